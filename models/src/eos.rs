//! End-of-sequence ids, as both configuration files write them.

use std::path::Path;

use serde_json::Value;

use crate::error::ModelError;

/// Parses an `eos_token_id`: an integer, a list of them, or null. Returns the ids inside the vocabulary and,
/// apart, those outside it, which no model can sample.
///
/// # Errors
/// Anything else, with the value.
pub(crate) fn eos_ids(
    path: &Path,
    value: &Value,
    vocab_size: usize,
) -> Result<(Vec<u32>, Vec<i64>), ModelError> {
    let invalid = || ModelError::InvalidConfig {
        path: path.to_owned(),
        key: "eos_token_id",
        found: value.to_string(),
        expected: "an integer, a list of integers, or null".into(),
    };
    let items = match value {
        Value::Null => &[],
        Value::Array(items) => items.as_slice(),
        single => std::slice::from_ref(single),
    };
    let (mut inside, mut outside) = (Vec::new(), Vec::new());
    for item in items {
        let id = item.as_i64().ok_or_else(invalid)?;
        match u32::try_from(id) {
            Ok(id) if (id as usize) < vocab_size => inside.push(id),
            _ => outside.push(id),
        }
    }
    Ok((inside, outside))
}
