//! The status page in a real browser: drawn from the start, and kept up to date.

use std::process::Stdio;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tests::fleet::Fleet;
use tests::wait::until;
use tests::{Ask, prompts};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

/// Set where the browser must be there; elsewhere the test passes without it, and says so.
const NEED_BROWSER: &str = "KVFERRY_NEED_BROWSER";

const SOON: Duration = Duration::from_secs(30);

/// Chromium on one page, spoken to by its DevTools protocol.
struct Browser {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    next: u64,
    #[expect(dead_code, reason = "held for its Drop")]
    child: Child,
    #[expect(dead_code, reason = "held for its Drop")]
    profile: tempfile::TempDir,
}

impl Browser {
    /// `None` where there is none.
    async fn open(url: &str) -> Option<Self> {
        let profile = tempfile::tempdir().expect("a temporary folder can be made");
        let mut command = Command::new("chromium");
        command.args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-port=0",
            "about:blank",
        ]);
        command.arg(format!("--user-data-dir={}", profile.path().display()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().ok()?;
        let mut lines = BufReader::new(child.stderr.take().expect("it is piped")).lines();
        let address = timeout(SOON, async {
            loop {
                let line = lines.next_line().await.expect("its output can be read").expect("it goes on");
                if let Some(address) = line.strip_prefix("DevTools listening on ws://") {
                    return address.split('/').next().expect("a host and a port").to_owned();
                }
            }
        });
        let address = address.await.expect("the browser listens");
        // What it says from here on must not fill the pipe.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let pages =
            reqwest::Client::builder().no_proxy().build().expect("a client without TLS needs nothing");
        let pages: Value =
            pages.get(format!("http://{address}/json")).send().await.ok()?.json().await.ok()?;
        let page = pages.as_array()?.iter().find(|page| page["type"] == "page")?;
        let (socket, _) =
            tokio_tungstenite::connect_async(page["webSocketDebuggerUrl"].as_str()?).await.ok()?;
        let mut browser = Self { socket, next: 0, child, profile };
        browser.call("Page.navigate", json!({ "url": url })).await;
        Some(browser)
    }

    async fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let call = json!({ "id": self.next, "method": method, "params": params });
        self.socket.send(Message::text(call.to_string())).await.expect("the browser listens");
        let answer = async {
            loop {
                let message = self.socket.next().await.expect("the browser answers").expect("in one piece");
                let message: Value = serde_json::from_slice(&message.into_data()).unwrap_or_default();
                if message["id"] == self.next {
                    return message["result"].clone();
                }
            }
        };
        timeout(SOON, answer).await.expect("the browser answers")
    }

    /// The value of a JavaScript expression.
    async fn value(&mut self, expression: &str) -> Value {
        let result =
            self.call("Runtime.evaluate", json!({ "expression": expression, "returnByValue": true })).await;
        assert!(result.get("exceptionDetails").is_none(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    async fn becomes(&mut self, expression: &str, expected: Value) {
        let cell = tokio::sync::Mutex::new(self);
        until(SOON, &format!("{expression} to be {expected}"), || async {
            let found = cell.lock().await.value(expression).await;
            (found == expected).then_some(()).ok_or(found.to_string())
        })
        .await;
    }
}

#[tokio::test]
async fn the_status_page_is_drawn_and_follows_what_happens() {
    let mut fleet = Fleet::start(&["", ""], "--no-router-kv-events").await;
    let Some(mut browser) = Browser::open(&format!("{}/", fleet.client().url())).await else {
        let needed = std::env::var(NEED_BROWSER).is_ok_and(|value| value == "1");
        assert!(!needed, "there is no chromium, and {NEED_BROWSER}=1");
        return eprintln!("NOT TESTED: the status page, since there is no chromium");
    };
    browser.becomes("document.getElementById('state')?.textContent", json!("ready")).await;
    browser.becomes("document.querySelectorAll('#workers tr').length", json!(2)).await;
    browser.becomes("Number(document.body.dataset.news || 0) > 0", json!(true)).await;
    for seed in 0..5 {
        fleet.client().answer(&Ask::completion(prompts::ids(64, seed)).max_tokens(2)).await;
    }
    let requests = "[...document.querySelectorAll('#workers tr')].reduce((sum, row) => sum + Number(row.cells[10].textContent), 0)";
    browser.becomes(requests, json!(5)).await;
    browser.becomes("document.getElementById('ttft').textContent.includes('–')", json!(false)).await;
    browser.becomes("document.querySelector('#c-ttft path').getAttribute('d').length > 0", json!(true)).await;
    fleet.workers[0].kill();
    browser.becomes("document.getElementById('state').textContent", json!("degraded")).await;
    browser.becomes("document.querySelectorAll('#workers .unreachable').length", json!(1)).await;
    fleet.front.kill();
    browser.becomes("document.getElementById('state').textContent", json!("no connection")).await;
}
