//! Where the `serve` binary is; builds it if it is missing or older than its sources.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::SystemTime;

/// Names another `serve` binary to test; it is taken as it is.
const OVERRIDE: &str = "KVFERRY_SERVE";

/// The repository's root.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("this package lies in the repository. This is a bug.")
}

/// The folder with the binaries of the profile that the running test was built in, such as `target/release`.
pub fn profile_dir() -> PathBuf {
    let test = std::env::current_exe().expect("the test executable has a path");
    let dir = test.ancestors().nth(2).expect("test executables are in target/PROFILE/deps. This is a bug.");
    dir.to_owned()
}

/// The `serve` binary beside the running test, up to date. Built at most once in each test process.
///
/// # Panics
/// When it cannot be built: no test of a deployment can go on.
pub fn serve() -> &'static Path {
    static SERVE: OnceLock<PathBuf> = OnceLock::new();
    SERVE.get_or_init(|| match std::env::var_os(OVERRIDE) {
        Some(path) => path.into(),
        None => up_to_date(profile_dir()),
    })
}

fn up_to_date(dir: PathBuf) -> PathBuf {
    let binary = dir.join("serve");
    if is_current(&binary) {
        return binary;
    }
    let profile = match dir.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(profile) => profile,
    };
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(repository()).args([
        "build",
        "--package",
        "server",
        "--bin",
        "serve",
        "--profile",
        profile,
    ]);
    cargo.arg("--target-dir").arg(dir.parent().expect("target/PROFILE has a parent. This is a bug."));
    eprintln!("{} is missing or older than its sources, running {cargo:?}", binary.display());
    let status = cargo.status().unwrap_or_else(|error| panic!("{cargo:?} cannot be run: {error}"));
    assert!(status.success(), "{cargo:?} failed with {status}; or name a binary with {OVERRIDE}=PATH");
    binary
}

/// True if no source that went into the binary is newer than it. Cargo lists them beside it; one that is gone had a
/// parent that named it, which has changed.
fn is_current(binary: &Path) -> bool {
    let modified = |path: &Path| path.metadata().and_then(|meta| meta.modified()).ok();
    let (Some(built), Ok(list)) = (modified(binary), std::fs::read_to_string(binary.with_extension("d")))
    else {
        return false;
    };
    let newer = |path: &str| modified(Path::new(path)).is_some_and(|changed: SystemTime| changed > built);
    let sources = list.split_once(": ").map_or("", |(_, sources)| sources);
    let lock = repository().join("Cargo.lock");
    !sources.split_whitespace().any(newer) && !newer(&lock.to_string_lossy())
}
