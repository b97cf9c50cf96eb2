//! The files that benchmarks leave.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::{BenchError, Result};

/// Reads a file's name from the command line. Errors: nothing can be written there, which is better known before anything
/// was measured.
pub fn file(name: &str) -> std::result::Result<PathBuf, String> {
    let path = PathBuf::from(name);
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    match (path.is_dir(), folder.is_dir()) {
        (true, _) => Err("expected a file, this is a folder".into()),
        (false, false) => {
            Err(format!("expected a file in a folder that exists, {} does not", folder.display()))
        }
        (false, true) => Ok(path),
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    /// That a report's folder does not exist was found out after the measurement.
    #[test]
    fn a_report_that_cannot_be_written_is_refused_at_the_start() {
        let dir = tempfile::tempdir().expect("a temporary folder can be made");
        let inside = |name: &str| file(dir.path().join(name).to_str().expect("a text"));
        assert!(inside("a.json").is_ok() && file("a.json").is_ok());
        assert!(inside("b/a.json").unwrap_err().contains("/b does not"));
        assert!(inside("").unwrap_err().contains("folder"));
    }
}
