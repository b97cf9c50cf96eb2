//! OpenAI's own client, unchanged, against both deployments.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

use tests::serve_binary::{profile_dir, repository};
use tests::{Cluster, Deployment};

/// The client's version that is tested. Its dependencies are those that pip finds for it.
const OPENAI: &str = "openai==3.57.0";

fn run(command: &mut Command, hint: &str) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; {hint}"));
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (said(&output.stdout), said(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}; {hint}\n{out}\n{err}", output.status);
    output
}

/// A folder with the client, installed on the first call. Not a virtual environment: that needs a further package on
/// Debian, and pip alone is enough.
fn installed() -> PathBuf {
    let target = profile_dir().parent().expect("target/PROFILE has a parent").to_owned();
    let dir = target.join(OPENAI.replace("==", "-"));
    let hint = "the test of OpenAI's client needs python3 with pip (apt-get install python3-pip) and, the first \
                time, a network";
    // One test installs, the others wait for it.
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    if !dir.is_dir() {
        // Installed beside and renamed, so that a half installed one is never used.
        let work = tempfile::tempdir_in(&target).expect("the target folder is writable");
        let fresh = work.path().join("openai");
        let mut pip = Command::new("python3");
        pip.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
            "--target",
        ]);
        run(pip.arg(&fresh).arg(OPENAI), hint);
        // Another process's tests may have been faster.
        let moved = std::fs::rename(&fresh, &dir);
        assert!(moved.is_ok() || dir.is_dir(), "the client cannot be moved into place: {moved:?}");
    }
    dir
}

fn client_talks_to(cluster: &Cluster) {
    let script = repository().join("tests/openai_client.py");
    let mut python = Command::new("python3");
    python.arg(script).arg(format!("{}/v1", cluster.client().url())).env("PYTHONPATH", installed());
    let output = run(&mut python, "see the traceback");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.trim_end().ends_with("all checks passed"), "{said}");
}

#[tokio::test]
async fn openai_python_client_talks_to_one_process() {
    client_talks_to(&Deployment::both().start().await);
}

#[tokio::test]
async fn openai_python_client_talks_to_prefill_and_decode() {
    let cluster = Deployment::split("socket").start().await;
    client_talks_to(&cluster);
    assert!(cluster.client().metrics().await.transfers() > 0, "prompts went through the prefill worker");
    cluster.settled().await;
}
