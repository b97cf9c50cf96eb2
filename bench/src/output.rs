//! The files that benchmarks leave.

use std::path::Path;

use serde::Serialize;

use crate::error::{BenchError, Result};

/// Writes `report` as indented JSON; without a path nothing.
pub fn write_json(path: Option<&Path>, report: &impl Serialize) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let json =
        serde_json::to_string_pretty(report).expect("numbers and strings always serialize. This is a bug.");
    write(path, &json)
}

/// Writes `text` with a line's end, and says where.
pub fn write(path: &Path, text: &str) -> Result<()> {
    let shown = path.display().to_string();
    std::fs::write(path, format!("{text}\n")).map_err(BenchError::io(format!("writing {shown}")))?;
    println!("written to {shown}");
    Ok(())
}
