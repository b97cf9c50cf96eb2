//! NIXL's status codes as errors.

use super::sys::nixl_capi_status_t;
use crate::error::TransferError;

/// Turns a failed call into an error that names it.
pub fn check(call: &'static str, status: nixl_capi_status_t) -> Result<(), TransferError> {
    if status == nixl_capi_status_t::NIXL_CAPI_SUCCESS {
        return Ok(());
    }
    Err(TransferError::Library { call, status: format!("{} (NIXL)", describe(status)) })
}

/// The status in words, with its number.
pub fn describe(status: nixl_capi_status_t) -> String {
    let words = match status {
        nixl_capi_status_t::NIXL_CAPI_SUCCESS => "success",
        nixl_capi_status_t::NIXL_CAPI_IN_PROG => "still running",
        nixl_capi_status_t::NIXL_CAPI_ERROR_INVALID_PARAM => "invalid parameter",
        nixl_capi_status_t::NIXL_CAPI_ERROR_BACKEND => "backend error, or the peer is gone",
        nixl_capi_status_t::NIXL_CAPI_ERROR_INVALID_STATE => "invalid state",
        nixl_capi_status_t::NIXL_CAPI_ERROR_EXCEPTION => "exception in the library",
        nixl_capi_status_t::NIXL_CAPI_ERROR_NO_TELEMETRY => "no telemetry",
        nixl_capi_status_t::NIXL_CAPI_ERROR_NOT_FOUND => "not found",
        _ => "unknown status",
    };
    format!("{words} ({})", status.0)
}
