//! Reading a JSON object field by field, so that each error names the field, its value and what was expected.
//!
//! Values are not converted: `"5"` is not a number. A field that is `null` counts as absent.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// The fields of a request. Fields that nobody reads are ignored, as vLLM ignores them.
#[derive(Clone, Debug, Default)]
pub struct Fields {
    map: Map<String, Value>,
    /// Where in the request this object is, such as `stream_options.`; empty for the request itself.
    path: String,
}

impl Fields {
    pub fn new(map: Map<String, Value>) -> Self {
        Self { map, path: String::new() }
    }

    /// The value, unless absent or null.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// As [`Self::get`], but takes it out.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    pub fn bool(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    pub fn str(&self, name: &str) -> Result<Option<&str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    /// A finite number.
    pub fn number(&self, name: &str) -> Result<Option<f64>, ApiError> {
        self.read(name, "a number", Value::as_f64)
    }

    /// A whole number; `5.0` is one, as in JSON Schema.
    pub fn integer(&self, name: &str) -> Result<Option<i128>, ApiError> {
        self.read(name, "a whole number", integer)
    }

    /// A whole number within `[min, max]`.
    pub fn integer_within(&self, name: &str, min: i128, max: i128) -> Result<Option<i128>, ApiError> {
        let expected = match max {
            i128::MAX => format!("a whole number of at least {min}"),
            _ => format!("a whole number in [{min}, {max}]"),
        };
        self.read(name, &expected, |value| integer(value).filter(|n| (min..=max).contains(n)))
    }

    /// A number for which `valid` holds.
    pub fn number_within(
        &self,
        name: &str,
        expected: &str,
        valid: impl Fn(f64) -> bool,
    ) -> Result<Option<f64>, ApiError> {
        self.read(name, expected, |value| value.as_f64().filter(|&number| valid(number)))
    }

    /// A nested object.
    pub fn object(&self, name: &str) -> Result<Option<Fields>, ApiError> {
        let map = self.read(name, "an object", Value::as_object)?;
        let path = format!("{}{name}.", self.path);
        Ok(map.map(|map| Self { map: map.clone(), path }))
    }

    /// The error for `name` having another value than `expected`.
    pub fn unexpected(&self, name: &str, expected: impl AsRef<str>) -> ApiError {
        let value = self.map.get(name).unwrap_or(&Value::Null);
        ApiError::bad_value(format!("{}{name}", self.path), value, expected)
    }

    fn read<'a, T>(
        &'a self,
        name: &str,
        expected: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => convert(value).map(Some).ok_or_else(|| self.unexpected(name, expected)),
        }
    }
}

/// The whole number that `value` is, if it is one.
pub fn integer(value: &Value) -> Option<i128> {
    let Value::Number(number) = value else { return None };
    let whole = || number.as_f64().filter(|n| n.fract() == 0.0 && n.abs() < 1e18).map(|n| n as i128);
    number.as_u64().map(i128::from).or_else(|| number.as_i64().map(i128::from)).or_else(whole)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: Value) -> Fields {
        match value {
            Value::Object(map) => Fields::new(map),
            other => panic!("{other} is not an object"),
        }
    }

    #[test]
    fn wrong_types_are_named() {
        let fields = fields(json!({"n": "5", "t": true, "s": 5, "b": "maybe", "o": [], "f": 1.5}));
        let message = |error: ApiError| error.message;
        assert_eq!(message(fields.integer("n").unwrap_err()), "n is \"5\", expected a whole number");
        assert_eq!(message(fields.integer("f").unwrap_err()), "f is 1.5, expected a whole number");
        assert_eq!(message(fields.number("t").unwrap_err()), "t is true, expected a number");
        assert_eq!(message(fields.str("s").unwrap_err()), "s is 5, expected a string");
        assert_eq!(message(fields.bool("b").unwrap_err()), "b is \"maybe\", expected true or false");
        assert_eq!(message(fields.object("o").unwrap_err()), "o is [], expected an object");
    }

    #[test]
    fn null_is_absent_and_whole_floats_are_whole() {
        let fields = fields(json!({"n": null, "m": 5.0, "big": 18446744073709551615u64, "low": i64::MIN}));
        assert_eq!(fields.integer("n").unwrap(), None);
        assert_eq!(fields.integer("m").unwrap(), Some(5));
        assert_eq!(fields.integer("big").unwrap(), Some(u64::MAX.into()));
        assert_eq!(fields.integer("low").unwrap(), Some(i64::MIN.into()));
    }

    #[test]
    fn nested_fields_are_named_with_their_path() {
        let outer = fields(json!({"stream_options": {"include_usage": 1}}));
        let inner = outer.object("stream_options").unwrap().unwrap();
        let error = inner.bool("include_usage").unwrap_err();
        assert_eq!(error.message, "stream_options.include_usage is 1, expected true or false");
        assert_eq!(error.param.as_deref(), Some("stream_options.include_usage"));
    }
}
