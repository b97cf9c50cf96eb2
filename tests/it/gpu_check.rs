//! scripts/gpu-check over programs that only pretend: what it does when steps fail, and where there is something else.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A packed folder whose programs are shell scripts.
struct Pack(tempfile::TempDir);

impl Pack {
    /// All programs pass and say nothing, but for the kernel tests, which are `kernel_tests`, and `bench`.
    fn new(kernel_tests: &str, bench: &str) -> Self {
        let pack = Self(tempfile::tempdir().expect("a temporary folder"));
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/gpu-check");
        fs::copy(script, pack.path("gpu-check")).expect("the script is copied");
        fs::write(pack.path("cuda-emulator.so"), "").expect("the folder is written to");
        for (name, text) in [("serve", ""), ("golden", ""), ("kernel-tests", kernel_tests), ("bench", bench)]
        {
            fs::write(pack.path(name), format!("#!/bin/bash\n{text}\n")).expect("the folder is written to");
            fs::set_permissions(pack.path(name), fs::Permissions::from_mode(0o755)).expect("it is ours");
        }
        pack
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn dry_run(&self, out: &Path) -> Command {
        let mut command = Command::new(self.path("gpu-check"));
        command.arg("dry-run").arg("--out").arg(out);
        command
    }

    fn run(&self, out: &Path) -> Output {
        self.dry_run(out).output().expect("the script starts")
    }

    fn result(out: &Path) -> Value {
        let text = fs::read(out.join("gpu-check.json")).expect("the script wrote it");
        serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&text)))
    }
}

/// The end of a log is cut by bytes: half a character must not make the JSON unreadable, nor half a file of results.
#[test]
fn a_log_cut_within_a_character_and_a_file_cut_short_leave_the_json_readable() {
    let long_line = "printf '·%.0s' {1..3000}; printf '\\t\"quoted\\\\\"\\n'; exit 3";
    let results = "while [ $# -gt 1 ]; do [ $1 = --json ] && json=$2; shift; done
        case $json in */device.json) printf '{\"half\":' ;; *) echo '{\"whole\": 1}' ;; esac >\"${json:-/dev/null}\"";
    let pack = Pack::new(long_line, results);
    let out = pack.path("out");
    let output = pack.run(&out);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let result = Pack::result(&out);
    let steps = result["steps"].as_array().expect("a list");
    assert_eq!(steps[0]["status"], "failed(3)");
    assert!(steps[0]["error"].as_str().expect("its log").ends_with(" \"quoted\\\""), "{}", steps[0]);
    assert!(steps.len() > 5 && steps[1..].iter().all(|step| step["status"] == "passed"), "{steps:?}");
    assert_eq!((&result["passed"], &result["device"]), (&false.into(), &"cpu and emulated".into()));
    assert_eq!(result["results"]["device-cpu"]["whole"], 1);
    assert_eq!(result["results"].get("device"), None);
}

#[test]
fn an_out_folder_with_other_files_is_left_alone() {
    let pack = Pack::new("", "");
    let out = pack.path("out");
    fs::create_dir(&out).expect("a folder");
    fs::write(out.join("package.json"), "{}").expect("a file");
    let output = pack.run(&out);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("holds something else"), "{output:?}");
    assert!(out.join("package.json").exists());
    // An earlier run's results are replaced.
    fs::remove_file(out.join("package.json")).expect("a file");
    for _ in 0..2 {
        assert!(pack.run(&out).status.success());
        assert_eq!(Pack::result(&out)["passed"], true);
    }
}

/// True until the process is gone, or only waits for its parent to look.
fn runs(pid: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let from = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(from.elapsed() < Duration::from_secs(20), "{what} takes too long");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A step is in a process group of its own, which holds the GPU until it is killed.
#[test]
fn an_interrupted_run_leaves_no_step_behind() {
    let pack = Pack::new("echo $$ >pid; exec sleep 600", "");
    let mut script = pack.dry_run(&pack.path("out")).spawn().expect("the script starts");
    let pid = until("the first step", || {
        fs::read_to_string(pack.path("pid")).ok().filter(|pid| pid.ends_with('\n'))
    });
    let pid = pid.trim();
    assert!(runs(pid));
    // SAFETY: a signal to a child of ours that was not waited for.
    assert_eq!(unsafe { libc::kill(script.id() as i32, libc::SIGINT) }, 0);
    assert_eq!(script.wait().expect("it ends").code(), Some(2));
    until("the step's end", || (!runs(pid)).then_some(()));
}

#[test]
fn arguments_that_make_no_sense_are_named_before_anything_runs() {
    let pack = Pack::new("exit 3", "");
    for (arguments, words) in [
        (&["--device", "gpu9"][..], "--device is 'gpu9', expected cuda:N"),
        (&["run", "--device"], "--device is '', expected cuda:N"),
        (&["dry-run", "--device", "cuda:1"], "--device cuda:1 is for run"),
        (&["--out"], "--out wants a folder"),
        (&["--fast"], "unknown argument --fast"),
        (&["pack"], "pack wants a folder"),
        (&["pack", "out"], "pack runs in the repository"),
    ] {
        let output =
            Command::new(pack.path("gpu-check")).args(arguments).output().expect("the script starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(words), "{arguments:?}: {output:?}");
    }
    let output = Command::new(pack.path("gpu-check")).arg("--help").output().expect("the script starts");
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("dry-run"));
}
