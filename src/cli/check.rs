//! `kdtree check`: is a model complete, what does it need, how much context will fit. Reads headers only, so it is quick for any size.

use std::path::PathBuf;
use std::process::ExitCode;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use super::output::print;
use crate::model::report::{Card, Report};
use crate::model::source::ModelSource;

/// Checks a model's files without loading it: every tensor, what each rank holds, and the KV tokens that fit a card. Ends with status 1
/// when anything is wrong.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Directory of the model; without it the model inside this binary.
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Directory of its drafter; without it the drafter inside this binary, if the model is, else none.
    #[arg(long, value_name = "DIR")]
    pub drafter: Option<PathBuf>,
    /// Tensor-parallel ranks.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub tp: usize,
    /// Memory of one card in GiB.
    #[arg(long, value_name = "X", default_value_t = Card::default().gib)]
    pub card_gib: f64,
    /// Share of a card's memory that may be used.
    #[arg(long, value_name = "SHARE", default_value_t = Card::default().usable)]
    pub usable: f64,
    /// GiB per card for activations, graphs, communication and scratch.
    #[arg(long, value_name = "X", default_value_t = Card::default().work_gib)]
    pub work_gib: f64,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// Prints the report; status 1 when there are problems.
///
/// # Errors
/// A card that makes no sense, or standard output that cannot be written.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let card = Card { gib: args.card_gib, usable: args.usable, work_gib: args.work_gib };
    anyhow::ensure!(card.gib.is_finite() && card.gib > 0.0, "--card-gib: found {}, wanted a number of GiB above 0", card.gib);
    anyhow::ensure!(card.usable > 0.0 && card.usable <= 1.0, "--usable: found {}, wanted a share above 0 and up to 1", card.usable);
    anyhow::ensure!(card.work_gib.is_finite() && card.work_gib >= 0.0, "--work-gib: found {}, wanted 0 or more GiB", card.work_gib);
    let (model, drafter) = sources(args.model, args.drafter);
    let report = Report::new(&model, drafter.as_ref(), args.tp, card);
    let text = if args.json { format!("{}\n", serde_json::to_string_pretty(&report)?) } else { render(&report) };
    print(text)?;
    Ok(if report.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn sources(model: Option<PathBuf>, drafter: Option<PathBuf>) -> (ModelSource, Option<ModelSource>) {
    let drafter = drafter.map(ModelSource::Directory);
    match model {
        Some(model) => (ModelSource::Directory(model), drafter),
        None => (ModelSource::EmbeddedTarget, drafter.or(Some(ModelSource::EmbeddedDrafter))),
    }
}

/// The report as people read it.
fn render(report: &Report) -> String {
    let mut text = format!("model    {}\n", report.model);
    if let Some(drafter) = &report.drafter {
        text.push_str(&format!("drafter  {drafter}\n"));
    }
    if !report.parts.is_empty() {
        text.push_str(&format!("\n{}\n", parts_table(report)));
    }
    if report.skipped.tensors > 0 {
        text.push_str(&format!("\nnot used: {} tensors, {}\n", group(report.skipped.tensors as u64), size(report.skipped.bytes)));
    }
    if let Some(expert) = &report.expert {
        let ranks = report.ranks;
        text.push_str(&format!(
            "\nexperts  width {} on each of {ranks} ranks = {} groups\n",
            expert.width_per_rank, expert.groups_per_rank
        ));
    }
    if let Some(kv) = &report.kv {
        let left = if kv.bytes_left < 0 { "nothing".to_string() } else { size(kv.bytes_left as u64) };
        text.push_str(&format!(
            "KV       {} tokens on a card of {} GiB ({} % usable, {} GiB for work): {left} left, {} bytes a token in BF16\n",
            group(kv.tokens),
            kv.card.gib,
            kv.card.usable * 100.0,
            kv.card.work_gib,
            group(kv.bytes_per_token),
        ));
        if kv.tokens < kv.max_positions as u64 {
            text.push_str(&format!("         less than one context of {} tokens\n", group(kv.max_positions as u64)));
        }
    }
    for note in &report.notes {
        text.push_str(&format!("note     {note}\n"));
    }
    match report.problems.len() {
        0 => text.push_str("\nno problems\n"),
        count => text.push_str(&format!("\n{count} problem{}:\n", if count == 1 { "" } else { "s" })),
    }
    for problem in &report.problems {
        text.push_str(&format!("  - {problem}\n"));
    }
    text
}

fn parts_table(report: &Report) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["part", "tensors", "bytes", "", &format!("per rank of {}", report.ranks), ""]);
    for part in &report.parts {
        table.add_row(row(part.label, part.tensors, part.bytes, part.bytes_per_rank));
    }
    let (tensors, bytes) = report.total();
    table.add_row(row("total", tensors, bytes, report.bytes_per_rank));
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn row(label: &str, tensors: u64, bytes: u64, per_rank: u64) -> [String; 6] {
    [label.to_string(), group(tensors), group(bytes), size(bytes), group(per_rank), size(per_rank)]
}

/// A size with the unit that suits it.
fn size(bytes: u64) -> String {
    match bytes {
        0..0x10_0000 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

/// Digits in threes.
fn group(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_in_threes() {
        assert_eq!([0, 12, 123, 1234, 76_182_593_536].map(group), ["0", "12", "123", "1,234", "76,182,593,536"]);
        assert_eq!([76_182_593_536, 1 << 20, 100].map(size), ["70.95 GiB", "1.0 MiB", "0.1 KiB"]);
    }

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn status(arguments: &[&str]) -> anyhow::Result<ExitCode> {
        let cli: Cli = clap::Parser::try_parse_from(std::iter::once(&"check").chain(arguments))?;
        run(cli.args)
    }

    #[test]
    fn the_status_says_whether_anything_is_wrong() {
        let mini = concat!(env!("CARGO_MANIFEST_DIR"), "/models/k26-mini");
        let drafter = concat!(env!("CARGO_MANIFEST_DIR"), "/models/k26-mini-dflash");
        assert_eq!(status(&["--model", mini, "--drafter", drafter, "--tp", "2", "--json"]).unwrap(), ExitCode::SUCCESS);
        assert_eq!(status(&["--model", mini, "--drafter", mini]).unwrap(), ExitCode::FAILURE);
        assert_eq!(status(&["--model", mini, "--tp", "3"]).unwrap(), ExitCode::FAILURE);
        assert_eq!(status(&["--model", "moonshotai/Kimi-K2.6"]).unwrap(), ExitCode::FAILURE);
        assert!(status(&["--model", mini, "--card-gib", "-1"]).is_err() && status(&["--model", mini, "--usable", "94"]).is_err());
    }

    #[cfg(feature = "embedded-model")]
    #[test]
    fn without_a_model_the_embedded_one_and_its_drafter_are_checked() {
        assert_eq!(status(&[]).unwrap(), ExitCode::SUCCESS);
    }

    #[test]
    fn the_report_names_parts_totals_and_problems() {
        let model = ModelSource::directory(concat!(env!("CARGO_MANIFEST_DIR"), "/models/k26-mini"));
        let report = Report::new(&model, None, 4, Card::default());
        let text = render(&report);
        for part in
            ["routed experts, packed", "total", "24,834,176", "per rank of 4", "width 32 on each of 4 ranks = 1 groups", "no problems"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = render(&Report::new(&ModelSource::directory("/does/not/exist"), None, 1, Card::default()));
        assert!(text.contains("1 problem:") && text.contains("no such directory /does/not/exist"), "{text}");
    }
}
