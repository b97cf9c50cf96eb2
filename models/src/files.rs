//! Reading a model's small files, with errors that name them.

use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;

use crate::error::ModelError;

/// The JSON in `path`, or `None` when there is no such file.
pub(crate) fn read_json(path: &Path) -> Result<Option<Value>, ModelError> {
    let Some(bytes) = read(path)? else { return Ok(None) };
    let value = serde_json::from_slice(&bytes)
        .map_err(|source| ModelError::Json { path: path.to_owned(), source })?;
    Ok(Some(value))
}

/// The bytes of `path`, or `None` when there is no such file.
pub(crate) fn read(path: &Path) -> Result<Option<Vec<u8>>, ModelError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ModelError::Io { path: path.to_owned(), source }),
    }
}
