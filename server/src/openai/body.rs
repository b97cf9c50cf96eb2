//! A request's body: JSON, or a 400 that says what is wrong with it.

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use serde_json::Value;

use super::fields::Fields;
use crate::error::{ApiError, shown};

/// Bodies above this are refused: prompts of a million tokens as text or ids fit well below it.
pub const MAX_BODY_BYTES: usize = 32 << 20;

/// The body, which must be a JSON object of type `application/json`.
pub struct JsonBody(pub Fields);

impl<S: Send + Sync> FromRequest<S> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        check_content_type(request.headers())?;
        let bytes = Bytes::from_request(request, state).await.map_err(body_error)?;
        parse(&bytes).map(JsonBody)
    }
}

/// Why a body could not be read.
pub fn body_error(rejection: BytesRejection) -> ApiError {
    match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            let message = format!("the body is larger than {} MiB", MAX_BODY_BYTES >> 20);
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
        }
        _ => ApiError::bad_request("the body could not be read"),
    }
}

/// 400 unless the body is said to be JSON.
pub fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let found = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let media_type = found.split(';').next().unwrap_or_default().trim();
    if media_type.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = format!("the content type is {}, expected application/json", shown(&found.into()));
    Err(ApiError::bad_request(message))
}

/// The object that `bytes` are; 400 says what they are instead.
pub fn parse(bytes: &[u8]) -> Result<Fields, ApiError> {
    if bytes.is_empty() {
        return Err(ApiError::bad_request("the body is empty, expected a JSON object"));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| {
        ApiError::bad_request(format!("the body is not UTF-8: byte {} is wrong", error.valid_up_to()))
    })?;
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => Ok(Fields::new(map)),
        Ok(other) => {
            Err(ApiError::bad_request(format!("the body is {}, expected a JSON object", shown(&other))))
        }
        Err(error) => Err(ApiError::bad_request(format!("the body is not valid JSON: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(bytes: &[u8]) -> String {
        parse(bytes).unwrap_err().message
    }

    #[test]
    fn each_fault_is_named() {
        assert_eq!(message(b""), "the body is empty, expected a JSON object");
        assert_eq!(message(b"[]"), "the body is [], expected a JSON object");
        assert_eq!(message(b"{\"m\":\"\xc4\xe3\"}"), "the body is not UTF-8: byte 6 is wrong");
        assert!(message(b"{\"a\":1").starts_with("the body is not valid JSON: EOF"));
        assert!(message(br#"{"a":"\ud800"}"#).starts_with("the body is not valid JSON: "));
    }

    #[test]
    fn deep_nesting_is_refused_without_overflowing_the_stack() {
        let bytes = "[".repeat(100_000);
        assert!(message(bytes.as_bytes()).contains("recursion limit exceeded"));
    }

    #[test]
    fn the_content_type_is_needed() {
        let check = |kind: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, kind.parse().unwrap());
            check_content_type(&headers)
        };
        assert!(check("application/json").is_ok());
        assert!(check("Application/JSON; charset=utf-8").is_ok());
        let message = check("text/plain").unwrap_err().message;
        assert_eq!(message, "the content type is \"text/plain\", expected application/json");
        assert!(check_content_type(&HeaderMap::new()).is_err());
    }
}
