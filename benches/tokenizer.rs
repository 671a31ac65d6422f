//! Encoding prompts, decoding streams and rendering conversations, by the small model's vocabulary.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kdtree::model::chat::{ChatOptions, ChatTemplate, Conversation};
use kdtree::model::source::ModelSource;
use kdtree::model::tokenizer::{StreamDecoder, Tokenizer};
use serde_json::{Value, json};

const ENGLISH: &str = "Once upon a time there was a king who had three sons, and the eldest of them was called the Wise. \
                       In 1850 he left the old town; nobody's sure why, but he'd promised to come back within 12 years.\n\n";
const MIXED: &str = "def f(n):\n    return n * 2  # 東京 и Москва: Café naïve\n";

fn source() -> ModelSource {
    ModelSource::directory(concat!(env!("CARGO_MANIFEST_DIR"), "/models/k26-mini"))
}

fn load() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::load(&source()).expect("the model in the repository"))
}

fn text(criterion: &mut Criterion) {
    let tokenizer = load();
    let mut group = criterion.benchmark_group("tokenizer");
    for (name, text) in [("english", ENGLISH.repeat(200)), ("mixed", MIXED.repeat(500)), ("spaces", " ".repeat(100_000))] {
        group.throughput(Throughput::Bytes(text.len() as u64));
        group.bench_function(format!("encode/{name}"), |b| b.iter(|| tokenizer.encode(black_box(&text))));
    }
    let ids = tokenizer.encode(&MIXED.repeat(100));
    group.throughput(Throughput::Elements(ids.len() as u64));
    group.bench_function("stream", |b| {
        b.iter(|| {
            let mut decoder = StreamDecoder::new(true);
            ids.iter().map(|&id| decoder.push(&tokenizer, black_box(id)).len()).sum::<usize>()
        })
    });
    group.finish();
}

fn chat(criterion: &mut Criterion) {
    let tokenizer = load();
    let turns: Vec<Value> = (0..40).map(|i| json!({"role": if i % 2 == 0 { "user" } else { "assistant" }, "content": ENGLISH})).collect();
    let conversation = Conversation::parse(&Value::from(turns), None).expect("a valid conversation");
    let builtin = ChatTemplate::builtin(tokenizer.clone()).expect("Kimi's control tokens");
    let jinja = ChatTemplate::load(&source(), tokenizer).expect("the model's template");
    let mut group = criterion.benchmark_group("chat");
    for (name, template) in [("builtin", builtin), ("jinja", jinja)] {
        group.bench_function(format!("40 turns/{name}"), |b| {
            b.iter(|| template.render(black_box(&conversation), &ChatOptions::default()).map(|prompt| prompt.ids.len()))
        });
    }
    group.finish();
}

criterion_group!(benches, text, chat);
criterion_main!(benches);
