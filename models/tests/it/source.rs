//! Where a model comes from. The hub is a small HTTP server here.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use models::{HubOptions, ModelError, SourceOptions, resolve};
use serde_json::json;

use crate::tiny::{Tiny, assert_error, qwen3_config};

const COMMIT: &str = "c1899de289a04d12100db370d81485cdf75e47ca";

fn options(cache: &Path, endpoint: &str) -> SourceOptions {
    let hub = HubOptions {
        cache: cache.to_owned(),
        endpoint: endpoint.to_owned(),
        token: None,
        offline: false,
        stall: Duration::from_secs(5),
    };
    SourceOptions { demo_dir: None, hub, weights: true }
}

/// No request leaves the machine, and none is answered.
fn nothing() -> SourceOptions {
    let mut options = options(Path::new("/nonexistent/cache"), "http://127.0.0.1:1");
    options.hub.offline = true;
    options
}

/// Paths asked for, with the Authorization header.
type Log = Arc<Mutex<Vec<(String, Option<String>)>>>;

/// A hub with one repository; it lives as long as the test's process.
struct FakeHub {
    endpoint: String,
    requests: Log,
}

impl FakeHub {
    fn start(files: BTreeMap<String, Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Log::default();
        let log = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // The client may close a connection that it has enough of.
                let _ = answer(stream.unwrap(), &files, &log);
            }
        });
        Self { endpoint, requests }
    }

    fn of(tiny: &Tiny) -> Self {
        let entries = std::fs::read_dir(tiny.path()).unwrap().map(|entry| entry.unwrap().path());
        let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        Self::start(entries.map(|path| (name(&path), std::fs::read(&path).unwrap())).collect())
    }
}

fn answer(stream: TcpStream, files: &BTreeMap<String, Vec<u8>>, log: &Log) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().unwrap_or(Ok(String::new()))?;
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    log.lock().unwrap().push((path.clone(), headers.get("authorization").cloned()));

    let mut out = stream;
    let body = if path == "/api/models/Org/Tiny/revision/main" {
        let siblings: Vec<_> = files.keys().map(|name| json!({"rfilename": name})).collect();
        Some(json!({"sha": COMMIT, "siblings": siblings}).to_string().into_bytes())
    } else {
        path.strip_prefix(&format!("/Org/Tiny/resolve/{COMMIT}/")).and_then(|name| files.get(name)).cloned()
    };
    let Some(body) = body else {
        return write!(out, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    };
    let range = headers.get("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let number = |text: &str, default: usize| text.parse().unwrap_or(default);
    let (start, end) = range.map_or((0, body.len() - 1), |(a, b)| (number(a, 0), number(b, body.len() - 1)));
    let part = &body[start..=end];
    write!(
        out,
        "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes {start}-{end}/{}\r\n\
         ETag: \"{}\"\r\nX-Repo-Commit: {COMMIT}\r\nConnection: close\r\n\r\n",
        part.len(),
        body.len(),
        xxhash_rust::xxh3::xxh3_64(&body),
    )?;
    out.write_all(part)
}

/// A tiny model with the demo's tokenizer beside it, and a file that nobody should fetch.
fn tiny_repository(sharded: bool) -> Tiny {
    let tiny = Tiny::new(qwen3_config());
    if sharded {
        drop(tiny.write_sharded())
    } else {
        tiny.write_single()
    }
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"] {
        std::fs::copy(crate::text::demo_dir().join(file), tiny.path().join(file)).unwrap();
    }
    tiny.write("pytorch_model.bin", "x");
    tiny
}

#[test]
fn folder_is_taken_as_it_is() {
    let tiny = Tiny::new(qwen3_config());
    tiny.write_single();
    let path = tiny.path().to_str().unwrap();
    assert_eq!(resolve(path, &nothing()).unwrap(), tiny.path());
}

#[test]
fn wrong_paths_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("file.gguf"), "x").unwrap();
    std::fs::create_dir_all(path("cache/snapshots")).unwrap();
    assert_error(resolve(&path("absent"), &nothing()), "path_not_found", &["absent does not exist"]);
    assert_error(resolve(&path("file.gguf"), &nothing()), "not_a_folder", &["file.gguf"]);
    assert_error(resolve(&path(""), &nothing()), "missing_file", &["no config.json in"]);
    assert_error(resolve(&path("cache"), &nothing()), "missing_file", &["snapshots/COMMIT"]);
}

#[test]
fn names_that_are_no_model_are_refused_without_the_network() {
    for name in ["", "gpt2", "a/b c", "org/..", "../x@y", "org/name@", "org/name@../../x", "a/b/c@main"] {
        let error = resolve(name, &nothing()).unwrap_err();
        assert!(["bad_model_name", "path_not_found"].contains(&error.label()), "{name}: {error}");
    }
}

#[test]
fn demo_is_found_and_can_be_elsewhere() {
    let found = resolve("demo", &nothing()).unwrap();
    assert!(found.join("config.json").is_file());
    let mut elsewhere = nothing();
    elsewhere.demo_dir = Some("/nonexistent".into());
    assert_error(resolve("demo", &elsewhere), "demo_not_found", &["/nonexistent"]);
}

#[test]
fn download_fills_the_cache_and_is_not_repeated() {
    for sharded in [false, true] {
        let hub = FakeHub::of(&tiny_repository(sharded));
        let cache = tempfile::tempdir().unwrap();
        let mut options = options(cache.path(), &hub.endpoint);
        options.hub.token = Some("secret".into());
        let dir = resolve("Org/Tiny", &options).unwrap();
        assert_eq!(dir, cache.path().join("models--Org--Tiny/snapshots").join(COMMIT));
        assert!(dir.join("chat_template.jinja").is_file() && !dir.join("pytorch_model.bin").exists());
        models::Weights::open(&dir).unwrap().check(&models::ModelConfig::load(&dir).unwrap()).unwrap();

        let asked = std::mem::take(&mut *hub.requests.lock().unwrap());
        assert!(asked.iter().all(|(_, token)| token.as_deref() == Some("Bearer secret")));
        options.hub.offline = true;
        for name in ["Org/Tiny", "Org/Tiny@main", &format!("Org/Tiny@{COMMIT}")] {
            assert_eq!(resolve(name, &options).unwrap(), dir);
        }
        assert!(hub.requests.lock().unwrap().is_empty());
    }
}

#[test]
fn interrupted_download_was_taken_for_a_model() {
    let tiny = tiny_repository(true);
    let shard = tiny.path().join("model-00002-of-00002.safetensors");
    let whole = std::fs::read(&shard).unwrap();
    std::fs::remove_file(&shard).unwrap();
    let cache = tempfile::tempdir().unwrap();
    let hub = FakeHub::of(&tiny);
    let broken = resolve("Org/Tiny", &options(cache.path(), &hub.endpoint));
    assert_error(broken, "hub", &["model-00002-of-00002.safetensors", "404", "--model PATH"]);

    let mut offline = options(cache.path(), &hub.endpoint);
    offline.hub.offline = true;
    assert_error(resolve("Org/Tiny", &offline), "not_in_cache", &["Org/Tiny@main", "HF_HUB_OFFLINE"]);

    std::fs::write(&shard, whole).unwrap();
    let hub = FakeHub::of(&tiny);
    resolve("Org/Tiny", &options(cache.path(), &hub.endpoint)).unwrap();
    let requests = hub.requests.lock().unwrap();
    assert!(requests.iter().all(|(path, _)| path.contains("model-00002") || path.contains("/api/")));
}

#[test]
fn prefill_and_decode_that_start_together_share_one_download() {
    let hub = FakeHub::of(&tiny_repository(true));
    let cache = tempfile::tempdir().unwrap();
    let options = options(cache.path(), &hub.endpoint);
    let folders = std::thread::scope(|scope| {
        let starts = [(); 4].map(|()| scope.spawn(|| resolve("Org/Tiny", &options).unwrap()));
        starts.map(|start| start.join().unwrap())
    });
    assert!(folders.iter().all(|dir| *dir == folders[0]));
    models::Weights::open(&folders[0]).unwrap();
}

#[test]
fn frontend_fetches_no_weights() {
    let hub = FakeHub::of(&tiny_repository(false));
    let cache = tempfile::tempdir().unwrap();
    let mut options = options(cache.path(), &hub.endpoint);
    options.weights = false;
    let dir = resolve("Org/Tiny", &options).unwrap();
    assert!(dir.join("tokenizer.json").is_file() && !dir.join("model.safetensors").exists());
}

#[test]
fn no_network_says_what_to_do() {
    let cache = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let result = resolve("Qwen/Qwen3-0.6B", &options(cache.path(), "http://127.0.0.1:1"));
    let parts = ["Qwen/Qwen3-0.6B@main", "http://127.0.0.1:1", "--model PATH", "HF_HUB_OFFLINE=1", "refused"];
    assert_error(result, "hub", &parts);
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn unknown_repository_is_said() {
    let hub = FakeHub::start(BTreeMap::new());
    let cache = tempfile::tempdir().unwrap();
    let result: Result<_, ModelError> = resolve("Org/Other", &options(cache.path(), &hub.endpoint));
    assert_error(result, "hub", &["404", "no such model"]);
}

#[test]
fn silent_hub_hung_the_start_for_ever() {
    // Accepts connections (by its backlog) and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let cache = tempfile::tempdir().unwrap();
    let mut options = options(cache.path(), &format!("http://{}", silent.local_addr().unwrap()));
    options.hub.stall = Duration::from_millis(300);
    assert_error(resolve("Org/Tiny", &options), "hub", &["no bytes for 300ms"]);
}

#[test]
fn environment_means_what_it_means_to_huggingface_hub() {
    let from = |vars: &[(&str, &str)]| {
        let vars: BTreeMap<String, String> =
            vars.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        SourceOptions::from_vars(|name| vars.get(name).cloned())
    };
    let plain = from(&[("HOME", "/h")]);
    assert_eq!(plain.hub.cache, Path::new("/h/.cache/huggingface/hub"));
    assert_eq!(plain.hub.endpoint, "https://huggingface.co");
    assert!(!plain.hub.offline && plain.demo_dir.is_none() && plain.hub.token.is_none());
    assert_eq!(from(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]).hub.cache, Path::new("/x/huggingface/hub"));
    assert_eq!(from(&[("HF_HOME", "/f")]).hub.cache, Path::new("/f/hub"));
    assert_eq!(from(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]).hub.cache, Path::new("/c"));
    for (value, offline) in [("1", true), ("TRUE", true), ("on", true), ("0", false), ("", false)] {
        assert_eq!(from(&[("HF_HUB_OFFLINE", value)]).hub.offline, offline);
    }
    let full = from(&[("HF_TOKEN", " t\n"), ("HF_ENDPOINT", "http://e"), ("KVFERRY_DEMO_DIR", "/d")]);
    assert_eq!((full.hub.token.as_deref(), full.hub.endpoint.as_str()), (Some("t"), "http://e"));
    assert_eq!(full.demo_dir.as_deref(), Some(Path::new("/d")));
}
