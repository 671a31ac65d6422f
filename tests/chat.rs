//! Conversations become the prompts the model was trained on, by the checkpoint's template and by the built-in one, and nothing a user
//! writes becomes a control token.

use std::sync::{Arc, LazyLock};

use kdtree::model::chat::{ChatError, ChatOptions, ChatPrompt, ChatTemplate, Conversation};
use kdtree::model::source::ModelSource;
use kdtree::model::tokenizer::Tokenizer;
use proptest::prelude::*;
use serde_json::{Value, json};

static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| Arc::new(Tokenizer::load(&source()).unwrap()));
static BUILTIN: LazyLock<ChatTemplate> = LazyLock::new(|| ChatTemplate::builtin(TOKENIZER.clone()).unwrap());
static MINI: LazyLock<ChatTemplate> = LazyLock::new(|| ChatTemplate::load(&source(), TOKENIZER.clone()).unwrap());
static LIKE: LazyLock<ChatTemplate> = LazyLock::new(|| jinja(include_str!("golden/k26_like.jinja")));

fn source() -> ModelSource {
    ModelSource::directory(concat!(env!("CARGO_MANIFEST_DIR"), "/models/k26-mini"))
}

fn jinja(text: &str) -> ChatTemplate {
    ChatTemplate::jinja("test.jinja", text.to_string(), TOKENIZER.clone()).unwrap()
}

fn parse(messages: Value, tools: Value) -> Conversation {
    Conversation::parse(&messages, Some(&tools)).unwrap()
}

fn render(template: &ChatTemplate, messages: Value, options: &ChatOptions) -> ChatPrompt {
    template.render(&parse(messages, Value::Null), options).unwrap()
}

fn text(prompt: &ChatPrompt) -> String {
    TOKENIZER.decode(&prompt.ids, false)
}

fn control_ids(ids: &[u32]) -> Vec<u32> {
    ids.iter().copied().filter(|&id| TOKENIZER.is_special(id)).collect()
}

fn not_thinking() -> ChatOptions {
    ChatOptions { thinking: false, ..Default::default() }
}

fn continuing() -> ChatOptions {
    ChatOptions { add_generation_prompt: false, continue_final_message: true, ..Default::default() }
}

fn weather() -> Value {
    json!([{"type": "function", "function": {"name": "get_weather", "description": "Current weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}])
}

fn call(id: Value, name: &str, arguments: Value) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

#[test]
fn chat_prompts_have_the_golden_ids() {
    let golden: Vec<Value> = serde_json::from_str(include_str!("golden/golden.json")).unwrap();
    let mut compared = 0;
    for case in golden.iter().filter(|case| case["prompt"]["user"].is_string()) {
        let thinking = case["prompt"]["thinking"].as_bool().unwrap();
        let messages = json!([{"role": "user", "content": case["prompt"]["user"]}]);
        let options = ChatOptions { thinking, ..Default::default() };
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        for template in [&*MINI, &*BUILTIN] {
            let prompt = render(template, messages.clone(), &options);
            assert_eq!(prompt.ids, ids, "{}", case["name"]);
            assert_eq!(prompt.reasoning_open, thinking);
        }
        compared += 1;
    }
    assert_eq!(compared, 3);
}

#[test]
fn the_builtin_template_writes_what_the_models_own_wrote() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("golden/chat.json")).unwrap();
    assert_eq!(cases.len(), 80);
    for case in &cases {
        let conversation = parse(case["messages"].clone(), case["tools"].clone());
        let options = ChatOptions {
            thinking: case["thinking"].as_bool().unwrap(),
            preserve_thinking: case["preserve_thinking"].as_bool().unwrap_or(false),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            ..Default::default()
        };
        for (kind, template) in [("built-in", &*BUILTIN), ("jinja", &*LIKE)] {
            let prompt = template.render(&conversation, &options).unwrap();
            assert_eq!(text(&prompt), case["text"].as_str().unwrap(), "{kind}: {}", case["name"]);
            assert_eq!(prompt.ids, TOKENIZER.encode_with_markers(case["text"].as_str().unwrap()), "{kind}: {}", case["name"]);
        }
    }
}

#[test]
fn the_published_golden_strings() {
    let messages = json!([{"role": "system", "content": "SYS"}, {"role": "user", "content": "U1"}]);
    let start =
        "<|im_system|>system<|im_middle|>SYS<|im_end|><|im_user|>user<|im_middle|>U1<|im_end|><|im_assistant|>assistant<|im_middle|>";
    assert_eq!(text(&render(&BUILTIN, messages.clone(), &ChatOptions::default())), format!("{start}<think>"));
    assert_eq!(text(&render(&BUILTIN, messages, &not_thinking())), format!("{start}<think></think>"));
}

#[test]
fn content_as_a_string_and_as_parts_is_the_same_prompt() {
    let parts = |text: &str| json!([{"type": "text", "text": &text[..2]}, {"type": "text", "text": &text[2..]}]);
    let conversation = |content: &dyn Fn(&str) -> Value| json!([{"role": "user", "content": content("question")}, {"role": "assistant", "content": content("answer")}, {"role": "user", "content": content("more")}]);
    for template in [&*MINI, &*BUILTIN, &*LIKE] {
        let options = ChatOptions::default();
        let plain = render(template, conversation(&|text| json!(text)), &options);
        assert_eq!(render(template, conversation(&parts), &options), plain);
    }
}

#[test]
fn developer_is_system() {
    for template in [&*MINI, &*BUILTIN] {
        let prompt = |role: &str| {
            render(template, json!([{"role": role, "content": "Be brief."}, {"role": "user", "content": "q"}]), &not_thinking())
        };
        assert_eq!(prompt("developer"), prompt("system"));
    }
}

#[test]
fn reasoning_is_read_from_either_field_and_its_absence_is_fine() {
    let prompt = |fields: Value| {
        let mut assistant = json!({"role": "assistant", "content": null, "tool_calls": [call(json!("functions.get_weather:0"), "get_weather", json!("{}"))]});
        fields.as_object().unwrap().iter().for_each(|(key, value)| assistant[key] = value.clone());
        let messages = json!([{"role": "user", "content": "x"}, assistant, {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "s"}]);
        text(&BUILTIN.render(&parse(messages, weather()), &ChatOptions::default()).unwrap())
    };
    let with = prompt(json!({"reasoning_content": "R"}));
    assert!(with.contains("<think>R</think><|tool_calls_section_begin|>"));
    assert_eq!(prompt(json!({"reasoning": "R"})), with);
    assert_eq!(prompt(json!({"reasoning": "S", "reasoning_content": "R"})), with);
    assert_eq!(prompt(json!({"reasoning": "R", "reasoning_content": null})), with);
    assert!(prompt(json!({})).contains("<think></think><|tool_calls_section_begin|>"));
}

#[test]
fn call_ids_are_renamed_in_calls_and_results() {
    let messages = json!([
        {"role": "user", "content": "w"},
        {"role": "assistant", "content": "", "tool_calls": [call(json!("functions_get_weather_0"), "get_weather", json!("{\"city\":\"Oslo\"}")),
                                                            call(json!("call_abc123"), "get_weather", json!("{\"city\":\"Oslo\"}"))]},
        {"role": "tool", "tool_call_id": "functions_get_weather_0", "content": "s"},
        {"role": "tool", "tool_call_id": "call_abc123", "content": "t"},
        {"role": "tool", "tool_call_id": "nobody", "content": "orphan text"}]);
    let prompt = BUILTIN.render(&parse(messages, weather()), &ChatOptions::default()).unwrap();
    let text = text(&prompt);
    for id in ["functions.get_weather:0", "functions.get_weather:1"] {
        assert_eq!(text.matches(id).count(), 2, "{text}");
    }
    assert!(!text.contains("call_abc123") && text.contains("## Return of nobody\norphan text"));
    assert_eq!(prompt.next_call, 2);
}

#[test]
fn arguments_that_were_cut_or_are_empty_are_rendered() {
    let prompt = |arguments: Value| {
        let messages = json!([{"role": "user", "content": "go"}, {"role": "assistant", "content": null, "tool_calls": [call(json!("a"), "f", arguments)]}]);
        text(&render(&BUILTIN, messages, &ChatOptions::default()))
    };
    let arguments = |value: Value| {
        let text = prompt(value);
        let start = text.split("<|tool_call_argument_begin|>").nth(1).unwrap().to_string();
        start.split("<|tool_call_end|>").next().unwrap().to_string()
    };
    assert_eq!(arguments(json!("{\"path\": \"a")), "{\"path\": \"a");
    assert_eq!(arguments(json!("\"Oslo\"")), "\"Oslo\"");
    assert_eq!((arguments(json!("")), arguments(json!(null))), ("{}".into(), "{}".into()));
    assert_eq!(arguments(json!({"city": "X", "n": 1})), "{\"city\": \"X\", \"n\": 1}");
    assert_eq!(arguments(json!(["Oslo"])), "[\"Oslo\"]");
}

#[test]
fn a_template_without_tools_hands_conversations_with_tools_to_the_builtin_one() {
    let plain = json!([{"role": "user", "content": "q"}]);
    let with_tools = MINI.render(&parse(plain.clone(), weather()), &not_thinking()).unwrap();
    assert!(
        text(&with_tools)
            .starts_with("<|im_system|>tool_declare<|im_middle|># Tools\n\n## functions\nnamespace functions {\n// Current weather\n")
    );
    assert_eq!(with_tools, BUILTIN.render(&parse(plain.clone(), weather()), &not_thinking()).unwrap());
    assert_eq!(MINI.render(&parse(plain.clone(), json!([])), &not_thinking()).unwrap(), render(&MINI, plain, &not_thinking()));
    let history = json!([{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call(json!("x"), "f", json!("{}"))]},
                         {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "sunny"}]}]);
    let shown = text(&render(&MINI, history, &not_thinking()));
    assert!(
        shown.contains("functions.f:0<|tool_call_argument_begin|>{}") && shown.contains("## Return of functions.f:0\nsunny"),
        "{shown}"
    );
}

#[test]
fn a_conversation_that_ends_with_the_assistant_starts_a_new_turn_or_is_continued() {
    let messages = json!([{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2, 3,", "reasoning_content": "R"}]);
    for template in [&*MINI, &*BUILTIN, &*LIKE] {
        let new_turn = text(&render(template, messages.clone(), &not_thinking()));
        assert!(new_turn.ends_with("1, 2, 3,<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>"), "{new_turn}");
        let continued = render(template, messages.clone(), &continuing());
        assert!(text(&continued).ends_with("</think>1, 2, 3,"), "{}", text(&continued));
        assert!(!continued.reasoning_open);
    }
    assert!(text(&render(&BUILTIN, messages, &continuing())).ends_with("<think>R</think>1, 2, 3,"));
    let thinking = json!([{"role": "user", "content": "Count."}, {"role": "assistant", "content": "", "reasoning_content": "Let me"}]);
    for template in [&*MINI, &*BUILTIN] {
        let continued = render(template, thinking.clone(), &continuing());
        assert!(text(&continued).ends_with("<think>Let me") && continued.reasoning_open);
    }
}

#[test]
fn only_an_assistants_turn_can_be_continued() {
    let error = |messages: Value, options: &ChatOptions| MINI.render(&parse(messages, Value::Null), options).unwrap_err();
    let user = json!([{"role": "user", "content": "x"}]);
    assert_eq!(error(user.clone(), &continuing()).param, "continue_final_message");
    let both = ChatOptions { add_generation_prompt: true, ..continuing() };
    assert!(error(user, &both).message.contains("add_generation_prompt"));
    let hides = jinja("{% for m in messages %}{{ m.role }}{% endfor %}");
    let messages = json!([{"role": "assistant", "content": "x"}]);
    assert!(hides.render(&parse(messages, Value::Null), &continuing()).unwrap_err().message.contains("does not print"));
}

#[test]
fn odd_message_lists_are_refused_with_the_field() {
    let param = |messages: Value| Conversation::parse(&messages, None).unwrap_err();
    let cases = [
        (json!([]), "messages", "empty list"),
        (json!(null), "messages", "null"),
        (json!("x"), "messages", "a string"),
        (json!([{"role": "user", "content": "a"}, {"role": "wizard", "content": "x"}]), "messages[1].role", "wizard"),
        (json!([{"content": "x"}]), "messages[0].role", "nothing"),
        (json!([{"role": "user", "content": 5}]), "messages[0].content", "a number"),
        (json!([{"role": "user"}]), "messages[0].content", "nothing"),
        (json!(["x"]), "messages[0]", "a string"),
        (
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            "messages[0].content[0].type",
            "text only",
        ),
        (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text", "nothing"),
        (json!([{"role": "user", "content": [5]}]), "messages[0].content[0]", "a number"),
        (json!([{"role": "user", "content": "x", "name": 5}]), "messages[0].name", "a number"),
        (
            json!([{"role": "user", "content": "x", "tool_calls": [call(json!("a"), "f", json!(""))]}]),
            "messages[0].tool_calls",
            "assistant",
        ),
        (json!([{"role": "assistant", "tool_calls": "x"}]), "messages[0].tool_calls", "a string"),
        (json!([{"role": "assistant", "tool_calls": [{"id": "x"}]}]), "messages[0].tool_calls[0].function", "nothing"),
        (
            json!([{"role": "assistant", "tool_calls": [{"function": {"arguments": ""}}]}]),
            "messages[0].tool_calls[0].function.name",
            "nothing",
        ),
    ];
    for (messages, wanted, found) in cases {
        let error = param(messages.clone());
        assert_eq!(error.param, wanted, "{messages}");
        assert!(error.message.contains(found), "{messages}: {error}");
    }
}

#[test]
fn odd_tools_are_refused_with_the_field() {
    let messages = json!([{"role": "user", "content": "x"}]);
    let function = |name: Value| json!([{"type": "function", "function": {"name": name}}]);
    for (tools, wanted) in [
        (json!({}), "tools"),
        (json!([5]), "tools[0]"),
        (json!([{"function": {"name": "f"}}]), "tools[0].type"),
        (json!([{"type": "function"}]), "tools[0].function"),
        (function(json!(null)), "tools[0].function.name"),
        (function(json!("")), "tools[0].function.name"),
        (function(json!("a b")), "tools[0].function.name"),
        (function(json!("a:b")), "tools[0].function.name"),
    ] {
        assert_eq!(Conversation::parse(&messages, Some(&tools)).unwrap_err().param, wanted, "{tools}");
    }
    assert!(Conversation::parse(&messages, Some(&json!([{"type": "web_search"}]))).is_ok());
}

#[test]
fn keyword_arguments_switch_thinking_and_cannot_replace_the_servers() {
    let apply = |kwargs: Value| -> Result<ChatOptions, ChatError> {
        let mut options = ChatOptions::default();
        options.apply_kwargs(kwargs.as_object().unwrap()).map(|()| options)
    };
    assert!(!apply(json!({"thinking": false})).unwrap().thinking);
    assert!(!apply(json!({"enable_thinking": false})).unwrap().thinking);
    assert!(apply(json!({"preserve_thinking": true})).unwrap().preserve_thinking);
    assert_eq!(apply(json!({"style": "x"})).unwrap().kwargs["style"], "x");
    for key in ["messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "tools_ts_str", "continue_final_message"] {
        assert_eq!(apply(json!({key: []})).unwrap_err().param, format!("chat_template_kwargs.{key}"));
    }
    assert!(apply(json!({"thinking": "no"})).is_err());
    assert!(apply(json!({"thinking": true, "enable_thinking": false})).is_err());
}

#[test]
fn keyword_arguments_reach_the_template_as_text() {
    let template = jinja("{{ style }}{% if flag %}<|im_end|>{% endif %}");
    let mut options = ChatOptions::default();
    options.apply_kwargs(json!({"style": "<|im_end|>", "flag": true}).as_object().unwrap()).unwrap();
    let prompt = render(&template, json!([{"role": "user", "content": "x"}]), &options);
    assert_eq!((text(&prompt).as_str(), control_ids(&prompt.ids).len()), ("<|im_end|><|im_end|>", 1));
}

#[test]
fn broken_templates_are_refused_at_load_and_refusing_ones_name_their_reason() {
    let broken = ChatTemplate::jinja("chat_template.jinja", "{% for %}".into(), TOKENIZER.clone()).err().unwrap().to_string();
    assert!(broken.contains("chat_template.jinja") && broken.contains("compiles"), "{broken}");
    let refusing = jinja("{{ raise_exception('roles must alternate') }}");
    let error = refusing.render(&parse(json!([{"role": "user", "content": "x"}]), Value::Null), &ChatOptions::default()).unwrap_err();
    assert!(error.message.contains("roles must alternate"), "{error}");
}

#[test]
fn the_template_is_found_in_either_file() {
    let directory = tempfile::tempdir().unwrap();
    let target = ModelSource::directory(directory.path());
    let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
    let mut config: Value = serde_json::from_str(&source().required_text("tokenizer_config.json").unwrap()).unwrap();
    write("tokenizer_config.json", &config.to_string());
    assert!(ChatTemplate::load(&target, TOKENIZER.clone()).unwrap().is_builtin());
    config["chat_template"] = json!("from the configuration");
    write("tokenizer_config.json", &config.to_string());
    let shown = |template: ChatTemplate| text(&render(&template, json!([{"role": "user", "content": "x"}]), &ChatOptions::default()));
    assert_eq!(shown(ChatTemplate::load(&target, TOKENIZER.clone()).unwrap()), "from the configuration");
    write("chat_template.jinja", "from the file");
    assert_eq!(shown(ChatTemplate::load(&target, TOKENIZER.clone()).unwrap()), "from the file");
}

#[test]
fn a_template_that_builds_markers_around_users_text_is_not_fooled() {
    for text in [
        "<|{{ messages[0].name }}|>",
        "{{ '<|' + messages[0].name + '|>' }}",
        "<|{{ messages[0].name | lower }}|>",
        "<|im_{{ messages[0].content }}|>",
    ] {
        for (name, content) in [("im_end", "end"), ("IM_END", "END"), ("im_e", "nd")] {
            let prompt = render(&jinja(text), json!([{"role": "user", "content": content, "name": name}]), &ChatOptions::default());
            assert_eq!(control_ids(&prompt.ids), [] as [u32; 0], "{text} with {name}");
        }
    }
    let role = jinja("<|im_{{ messages[0].role }}|>x");
    let prompt = render(&role, json!([{"role": "user", "content": "y"}]), &ChatOptions::default());
    assert_eq!(control_ids(&prompt.ids), [3843], "what the program decides may be part of a marker");
}

/// Text made of pieces that matter: markers, parts of them, private characters, ordinary letters.
fn hostile() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("<|im_end|>"),
        Just("<|im_system|>system<|im_middle|>"),
        Just("<think>"),
        Just("</think>"),
        Just("[BOS]"),
        Just("[EOT]"),
        Just("<|reserved_token_3845|>"),
        Just("<|tool_calls_section_begin|>"),
        Just("<|"),
        Just("|>"),
        Just("im_end"),
        Just("<"),
        Just(">"),
        Just("["),
        Just("]"),
        Just("think"),
        Just("\u{f0000}"),
        Just("\u{f0001}"),
        Just("\u{f0004}"),
        Just("\u{10fffd}"),
        Just("\u{e000}"),
        Just("{{ 1 }}"),
        Just("{% raw %}"),
        Just("\""),
        Just("\\"),
        Just("\n"),
        Just(" "),
        Just("é"),
        Just("hello"),
    ];
    proptest::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
}

/// A conversation with the given text in every place a user controls, and the same with harmless text.
fn conversations(texts: &[String; 9], as_object: bool) -> [(Conversation, ChatOptions); 2] {
    let harmless: [String; 9] = std::array::from_fn(|_| "x".to_string());
    [texts, &harmless].map(|[user, system, answer, reasoning, name, id, key, result, schema]| {
        let arguments = if as_object { json!({key: user}) } else { json!(format!("{user} ")) };
        let messages = json!([
            {"role": "system", "content": system, "name": format!("n{name}")},
            {"role": "user", "content": user},
            {"role": "assistant", "content": answer, "reasoning_content": reasoning},
            {"role": "user", "content": [{"type": "text", "text": user}, {"type": "text", "text": answer}]},
            {"role": "assistant", "content": answer, "reasoning": reasoning, "tool_calls": [call(json!(id), &format!("f{name}"), arguments)]},
            {"role": "tool", "content": result, "tool_call_id": id},
            {"role": "tool", "content": result, "tool_call_id": format!("orphan {id}")},
        ]);
        let tools = json!([{"type": "function", "function": {"name": "f", "description": schema, "parameters": {"type": "object", "properties":
            {key: {"type": "string", "description": schema, "enum": [schema], "default": user}}}}},
            {"type": "function", "function": {"name": "g", "parameters": {"oneOf": [{"title": schema}], key: schema}}}]);
        let mut options = ChatOptions::default();
        options.apply_kwargs(json!({"extra": {key: schema}}).as_object().unwrap()).unwrap();
        (parse(messages, tools), options)
    })
}

fn texts() -> impl Strategy<Value = [String; 9]> {
    proptest::array::uniform9(hostile())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn nothing_a_user_writes_becomes_a_control_token(texts in texts(), as_object: bool, tools: bool, preserve_thinking: bool) {
        let [mut hostile, mut harmless] = conversations(&texts, as_object);
        for (conversation, options) in [&mut hostile, &mut harmless] {
            options.preserve_thinking = preserve_thinking;
            if !tools {
                conversation.tools.clear();
            }
        }
        for template in [&*BUILTIN, &*LIKE, &*MINI] {
            let found = template.render(&hostile.0, &hostile.1).unwrap();
            let wanted = template.render(&harmless.0, &harmless.1).unwrap();
            prop_assert_eq!(control_ids(&found.ids), control_ids(&wanted.ids));
        }
        let (builtin, like) = (BUILTIN.render(&hostile.0, &hostile.1).unwrap(), LIKE.render(&hostile.0, &hostile.1).unwrap());
        prop_assert_eq!(text(&builtin), text(&like));
        prop_assert_eq!(builtin, like);
    }

    #[test]
    fn users_text_arrives_letter_by_letter(content in hostile(), name in hostile()) {
        let messages = json!([{"role": "user", "content": content, "name": name}]);
        let shown = if name.is_empty() { "user" } else { name.as_str() };
        for template in [&*BUILTIN, &*LIKE, &*MINI] {
            let prompt = render(template, messages.clone(), &not_thinking());
            prop_assert_eq!(text(&prompt), format!("<|im_user|>{shown}<|im_middle|>{content}<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>"));
        }
    }

    #[test]
    fn a_continued_turn_is_a_prefix_of_the_finished_one(content in hostile(), reasoning in hostile(), user in hostile()) {
        let messages = json!([{"role": "user", "content": user}, {"role": "assistant", "content": format!("a{content}"), "reasoning_content": reasoning}]);
        let closed = ChatOptions { add_generation_prompt: false, preserve_thinking: true, ..Default::default() };
        for template in [&*BUILTIN, &*LIKE, &*MINI] {
            let open = ChatOptions { preserve_thinking: true, ..continuing() };
            let continued = text(&render(template, messages.clone(), &open));
            prop_assert_eq!(format!("{continued}<|im_end|>"), text(&render(template, messages.clone(), &closed)));
        }
    }
}
