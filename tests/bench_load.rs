//! `kdtree bench load` makes a checkpoint, loads a rank of it, and reports bytes that can be checked; it overwrites nothing.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn bench_load(model: &Path, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kdtree")).args(["bench", "load", "--device", "cpu", "--model"]).arg(model).args(more).output().unwrap()
}

#[test]
fn a_made_up_checkpoint_is_written_and_each_step_tells_its_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let (model, json) = (folder.path().join("model"), folder.path().join("load.json"));
    let output = bench_load(&model, &["--make", "small", "--layers", "3", "--tp", "8", "--rank", "5", "--json", json.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let steps: Vec<(&str, u64)> =
        report["steps"].as_array().unwrap().iter().map(|step| (step["what"].as_str().unwrap(), step["bytes"].as_u64().unwrap())).collect();
    let names: Vec<&str> = steps.iter().map(|step| step.0).collect();
    assert_eq!(names, ["writing the checkpoint", "the disk alone", "loading, cold", "checking values", "loading, from memory"]);
    let files: u64 = std::fs::read_dir(&model)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(".safetensors"))
        .map(|entry| entry.metadata().unwrap().len())
        .sum();
    assert_eq!((steps[0].1, steps[1].1), (files, files));
    let [all, held] = ["checkpoint_bytes", "rank_bytes"].map(|key| report[key].as_u64().unwrap());
    assert!(held < steps[2].1 && steps[2].1 < all, "a rank holds {held}, reads {} of {all}", steps[2].1);
    assert_eq!(steps[2].1, steps[4].1);

    let again = bench_load(&model, &["--make", "small"]);
    assert!(!again.status.success());
    assert!(String::from_utf8_lossy(&again.stderr).contains("is not empty"), "{}", String::from_utf8_lossy(&again.stderr));
    assert!(bench_load(&model, &["--tp", "2"]).status.success(), "a checkpoint that is there is loaded as it is");
}

#[test]
fn a_rank_that_is_not_there_and_a_cut_that_does_not_divide_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, wanted) in
        [(["--tp", "2", "--rank", "2"], "wanted less than --tp 2"), (["--tp", "7", "--rank", "0"], "multiple of the 7 ranks")]
    {
        let made: &[&str] = if arguments[1] == "7" { &["--make", "small"] } else { &[] };
        let output = bench_load(&folder.path().join("model"), &[&arguments, made].concat());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(wanted), "{error}");
    }
}
