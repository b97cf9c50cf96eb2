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
    let executable = std::env::current_exe().expect("the executable has a path");
    let dir = executable.parent().expect("an executable lies in a folder. This is a bug.");
    // Tests are in target/PROFILE/deps, programs in target/PROFILE.
    dir.parent().filter(|_| dir.ends_with("deps")).unwrap_or(dir).to_owned()
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

/// True if no source that went into the binary is newer than it.
fn is_current(binary: &Path) -> bool {
    let Some(built) = modified(binary) else { return false };
    let newer = |path: &Path| modified(path).is_some_and(|changed| changed > built);
    // Cargo lists them beside it; one that is gone had a parent that named it, which has changed. It lists none beside a
    // binary that it built for `server`'s own tests, which `cargo test --workspace` does.
    let listed = std::fs::read_to_string(binary.with_extension("d"));
    let stale = match &listed {
        Ok(list) => {
            let sources = list.split_once(": ").map_or("", |(_, sources)| sources);
            sources.split_whitespace().any(|path| newer(Path::new(path)))
        }
        Err(_) => PACKAGES.iter().any(|package| any_file(&repository().join(package), &newer)),
    };
    !stale && !newer(&repository().join("Cargo.lock"))
}

/// The packages that `serve` is made of.
const PACKAGES: [&str; 5] = ["kernels", "models", "transfer", "engine", "server"];

fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata().and_then(|meta| meta.modified()).ok()
}

/// Whether `found` is true of a package's manifest, build script or a file in its `src`.
fn any_file(package: &Path, found: &dyn Fn(&Path) -> bool) -> bool {
    fn within(dir: &Path, found: &dyn Fn(&Path) -> bool) -> bool {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries
            .map(|entry| entry.path())
            .any(|path| if path.is_dir() { within(&path, found) } else { found(&path) })
    }
    found(&package.join("Cargo.toml"))
        || found(&package.join("build.rs"))
        || within(&package.join("src"), found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `cargo test --workspace` builds `serve` without a list of its sources; building it once more, with other features,
    /// took five minutes.
    #[test]
    fn a_binary_without_a_list_is_compared_with_the_packages() {
        let dir = tempfile::tempdir().unwrap();
        let binary = dir.path().join("serve");
        assert!(!is_current(&binary), "there is none");
        let file = std::fs::File::create(&binary).unwrap();
        assert!(is_current(&binary), "made just now");
        file.set_modified(
            modified(&repository().join("server/src/main.rs")).unwrap() - std::time::Duration::from_secs(1),
        )
        .unwrap();
        assert!(!is_current(&binary), "older than a source");
    }
}
