//! Chat templates against goldens that transformers rendered with Qwen3's official template.

use std::time::{Duration, UNIX_EPOCH};

use models::{ChatInput, ChatTemplate, ModelError, TokenizerConfig};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::text::demo_dir;
use crate::tiny::assert_error;

#[derive(Deserialize)]
struct Golden {
    name: String,
    messages: Vec<Value>,
    tools: Vec<Value>,
    kwargs: Map<String, Value>,
    add_generation_prompt: bool,
    rendered: String,
}

/// Renders one user message with the template `source`.
fn render(source: &str, kwargs: Value) -> Result<String, ModelError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
    let config = TokenizerConfig { eos_token: Some("<eos>".into()), ..TokenizerConfig::default() };
    let template = ChatTemplate::load(dir.path(), &config)?.unwrap();
    render_with(&template, &[], kwargs)
}

fn render_with(template: &ChatTemplate, tools: &[Value], kwargs: Value) -> Result<String, ModelError> {
    template.render(ChatInput {
        messages: &[json!({"role": "user", "content": "Hi"})],
        tools,
        add_generation_prompt: true,
        kwargs: kwargs.as_object(),
        now: UNIX_EPOCH + Duration::from_secs(1_735_689_599),
    })
}

#[test]
fn demo_template_renders_what_transformers_renders_for_qwen3() {
    let goldens: Vec<Golden> = serde_json::from_str(include_str!("../fixtures/chat_golden.json")).unwrap();
    let template = ChatTemplate::load(&demo_dir(), &TokenizerConfig::default()).unwrap().unwrap();
    for golden in goldens {
        let rendered = template.render(ChatInput {
            messages: &golden.messages,
            tools: &golden.tools,
            add_generation_prompt: golden.add_generation_prompt,
            kwargs: Some(&golden.kwargs),
            now: UNIX_EPOCH,
        });
        assert_eq!(rendered.unwrap(), golden.rendered, "{}", golden.name);
    }
}

#[test]
fn template_that_refuses_gives_its_message() {
    let source = "{% macro check(m) %}{{ raise_exception('roles must ' ~ m.role) }}{% endmacro %}{{ check(messages[0]) }}";
    let error = render(source, json!({})).unwrap_err();
    assert!(error.is_client_error());
    assert!(
        matches!(&error, ModelError::TemplateRaised { message } if message == "roles must user"),
        "{error}"
    );
}

#[test]
fn template_that_stumbles_over_a_message_is_the_clients_error() {
    let error = render("{{ messages[0].content + messages[7].content }}", json!({})).unwrap_err();
    assert!(error.is_client_error());
    assert_eq!(error.label(), "template_failed");
}

#[test]
fn template_that_does_not_compile_is_named() {
    assert_error(render("{% if %}", json!({})), "bad_chat_template", &["chat_template.jinja"]);
}

#[test]
fn kwargs_reach_the_template_but_cannot_replace_the_request() {
    assert_eq!(render("{{ mode }}", json!({"mode": "x"})).unwrap(), "x");
    for name in ["messages", "tools", "add_generation_prompt", "strftime_now", "eos_token"] {
        let error = render("", json!({name: "x"}));
        assert_error(error, "reserved_template_variable", &[name]);
    }
}

#[test]
fn environment_behaves_as_transformers() {
    // Expected strings are those of transformers 5.24's render_jinja_template.
    let cases = [
        ("{{ eos_token }}{{ bos_token }}", "<eos>"),
        ("{{ strftime_now('%d %b %Y') }}", "31 Dec 2024"),
        ("{{ true }} {{ none }} {{ tools }} {{ 1.5 }}", "True None None 1.5"),
        ("  {% if true %}\n  a\n  {% endif %}\n", "  a\n"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{{ {'b': 'é<>&', 'a': [1, 2]} | tojson }}", "{\"b\": \"é<>&\", \"a\": [1, 2]}"),
        ("{{ {'b': 1, 'a': []} | tojson(indent=2) }}", "{\n  \"b\": 1,\n  \"a\": []\n}"),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", "{\"a\":2,\"b\":1}"),
        ("{{ ' a '.strip() ~ 'b\\n'.rstrip('\\n') ~ 'x-y'.split('-')[1] }}", "aby"),
    ];
    for (source, expected) in cases {
        assert_eq!(render(source, json!({})).unwrap(), expected, "{source}");
    }
}

#[test]
fn template_of_tokenizer_config_is_the_fallback() {
    let dir = tempfile::tempdir().unwrap();
    let load = |chat_template| {
        let config = TokenizerConfig { chat_template, ..TokenizerConfig::default() };
        ChatTemplate::load(dir.path(), &config)
    };
    assert!(load(None).unwrap().is_none());
    let single = load(Some(json!("one"))).unwrap().unwrap();
    assert_eq!(render_with(&single, &[], json!({})).unwrap(), "one");

    let named = json!([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]);
    let named = load(Some(named)).unwrap().unwrap();
    assert_eq!(render_with(&named, &[], json!({})).unwrap(), "plain");
    assert_eq!(render_with(&named, &[json!({})], json!({})).unwrap(), "tools");

    for bad in [json!([{"name": "rag", "template": "x"}]), json!([{"name": "default"}]), json!(3)] {
        assert_error(load(Some(bad)), "bad_chat_template", &["tokenizer_config.json"]);
    }
}
