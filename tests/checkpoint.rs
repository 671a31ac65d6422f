//! A damaged or mixed-up checkpoint is refused before anything runs on it, with every finding named; a good one is read bit by bit.

use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use kdtree::model::checkpoint::{Checkpoint, INDEX};
use kdtree::model::config::{DraftConfig, TargetConfig};
use kdtree::model::inventory::Inventory;
use kdtree::model::problem::{Problem, Problems};
use kdtree::model::progress::Silent;
use kdtree::model::source::ModelSource;
use kdtree::model::tensor::Cut;
use kdtree::model::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

const SHARD_1: &str = "model-00001-of-000002.safetensors";
const SHARD_2: &str = "model-00002-of-000002.safetensors";
const NORM: &str = "language_model.model.norm.weight";

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models")
}

/// A copy of one of the models that may be damaged.
struct Copy {
    directory: TempDir,
}

impl Copy {
    fn of(model: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(models().join(model)).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, directory.path().join(path.file_name().unwrap())).unwrap();
        }
        Self { directory }
    }

    fn target() -> Self {
        Self::of("k26-mini")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn source(&self) -> ModelSource {
        ModelSource::directory(self.directory.path())
    }

    fn open(&self) -> Result<Checkpoint, Problems> {
        let config = TargetConfig::load(&self.source())?;
        Checkpoint::open_target(&self.source(), &config)
    }

    fn problems(&self) -> Vec<Problem> {
        self.open().err().expect("the damage must be found").list
    }

    /// The only finding.
    fn problem(&self) -> Problem {
        let problems = self.problems();
        assert_eq!(problems.len(), 1, "{problems:#?}");
        problems.into_iter().next().unwrap()
    }

    /// Changes header and data of a shard.
    fn rewrite(&self, shard: &str, change: impl FnOnce(&mut Map<String, Value>, &mut Vec<u8>)) {
        let bytes = fs::read(self.path(shard)).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let mut data = bytes[8 + length..].to_vec();
        change(&mut header, &mut data);
        let header = serde_json::to_vec(&header).unwrap();
        let length = (header.len() as u64).to_le_bytes();
        fs::write(self.path(shard), [&length[..], &header, &data].concat()).unwrap();
    }

    /// Adds a tensor at the end of a shard, and to the index if asked.
    fn add(&self, shard: &str, name: &str, dtype: &str, shape: &[usize], bytes: &[u8], indexed: bool) {
        self.rewrite(shard, |header, data| {
            let range = [data.len(), data.len() + bytes.len()];
            header.insert(name.into(), json!({"dtype": dtype, "shape": shape, "data_offsets": range}));
            data.extend_from_slice(bytes);
        });
        if indexed {
            self.index(|map| _ = map.insert(name.into(), json!(shard)));
        }
    }

    /// Removes a tensor and its bytes from a shard, moving what follows it.
    fn remove(&self, shard: &str, name: &str) {
        self.rewrite(shard, |header, data| {
            let removed = header.remove(name).unwrap();
            let (begin, end) = range(&removed);
            data.drain(begin..end);
            for (_, info) in header.iter_mut().filter(|(name, _)| *name != "__metadata__") {
                let (b, e) = range(info);
                if b >= end {
                    info["data_offsets"] = json!([b - (end - begin), e - (end - begin)]);
                }
            }
        });
    }

    /// Overwrites bytes of a tensor.
    fn poke(&self, shard: &str, name: &str, at: usize, bytes: &[u8]) {
        self.rewrite(shard, |header, data| {
            let begin = range(&header[name]).0 + at;
            data[begin..begin + bytes.len()].copy_from_slice(bytes);
        });
    }

    fn index(&self, change: impl FnOnce(&mut Map<String, Value>)) {
        let mut index: Value = serde_json::from_slice(&fs::read(self.path(INDEX)).unwrap()).unwrap();
        change(index["weight_map"].as_object_mut().unwrap());
        fs::write(self.path(INDEX), index.to_string()).unwrap();
    }
}

fn range(info: &Value) -> (usize, usize) {
    let number = |i: usize| info["data_offsets"][i].as_u64().unwrap() as usize;
    (number(0), number(1))
}

fn assert_names(problem: &Problem, file: &str, subject: &str, found: &str, wanted: &str) {
    assert_eq!(problem.file, file, "{problem}");
    assert!(problem.subject.contains(subject), "{problem}");
    assert!(problem.found.contains(found), "{problem}");
    assert!(problem.wanted.contains(wanted), "{problem}");
}

#[test]
fn the_model_opens_from_its_directory_and_passes_the_scan() {
    let source = ModelSource::directory(models().join("k26-mini"));
    let config = TargetConfig::load(&source).unwrap();
    let checkpoint = Checkpoint::open_target(&source, &config).unwrap();
    assert_eq!(checkpoint.bytes(), 24_834_176, "the index's total_size");
    checkpoint.scan_values(&Silent).unwrap();
    let draft_source = ModelSource::directory(models().join("k26-mini-dflash"));
    let draft = DraftConfig::load(&draft_source, &config).unwrap();
    let drafter = Checkpoint::open_drafter(&draft_source, &draft).unwrap();
    assert_eq!(drafter.inventory().tensors.len(), 36);
    drafter.scan_values(&Silent).unwrap();
}

#[cfg(feature = "embedded-model")]
#[test]
fn the_embedded_model_is_the_one_in_the_repository() {
    use kdtree::model::inventory::Wanted;
    let directory = ModelSource::directory(models().join("k26-mini"));
    let config = TargetConfig::load(&ModelSource::EmbeddedTarget).unwrap();
    let embedded = Checkpoint::open_target(&ModelSource::EmbeddedTarget, &config).unwrap();
    let mapped = Checkpoint::open_target(&directory, &config).unwrap();
    for spec in embedded.inventory().tensors.iter().filter(|spec| spec.wanted == Wanted::Bf16 && spec.shape.len() == 2) {
        let shape = [spec.shape[0], spec.shape[1]];
        assert_eq!(embedded.matrix(&spec.name, shape).unwrap().data, mapped.matrix(&spec.name, shape).unwrap().data, "{}", spec.name);
    }
    let draft = DraftConfig::load(&ModelSource::EmbeddedDrafter, &config).unwrap();
    Checkpoint::open_drafter(&ModelSource::EmbeddedDrafter, &draft).unwrap();
}

#[test]
fn views_hold_the_bytes_of_the_file() {
    let copy = Copy::target();
    copy.poke(SHARD_2, NORM, 4, &bf16::from_f32(-1.5).to_le_bytes());
    copy.poke(SHARD_1, "language_model.model.layers.1.mlp.gate.e_score_correction_bias", 8, &2.5_f32.to_le_bytes());
    copy.poke(SHARD_1, "language_model.model.layers.1.mlp.experts.3.up_proj.weight_packed", 0, &[0x5f]);
    copy.poke(SHARD_1, "language_model.model.layers.1.mlp.experts.3.up_proj.weight_scale", 0, &bf16::from_f32(0.5).to_le_bytes());
    let checkpoint = copy.open().unwrap();
    assert_eq!(checkpoint.vector("model.norm.weight", 256).unwrap()[2], -1.5);
    assert_eq!(checkpoint.vector("model.layers.1.mlp.gate.e_score_correction_bias", 32).unwrap()[2], 2.5);
    let expert = checkpoint.int4("model.layers.1.mlp.experts.3.up_proj", [128, 256]).unwrap();
    assert_eq!(expert.group, 32);
    let mut row = vec![bf16::ZERO; 256];
    expert.unpack_row(0, &mut row);
    assert_eq!((row[0].to_f32(), row[1].to_f32()), (3.5, -1.5), "low nibble first, value = nibble - 8");
}

#[test]
fn parts_of_all_ranks_together_are_the_whole() {
    let checkpoint = Copy::target().open().unwrap();
    let whole = checkpoint.int4("model.layers.2.mlp.experts.0.down_proj", [256, 128]).unwrap();
    let all = whole.unpack();
    for ranks in [2, 4] {
        let parts: Vec<Vec<bf16>> = (0..ranks).map(|rank| whole.cut(Cut::Columns, rank, ranks).unpack()).collect();
        let width = 128 / ranks;
        for row in 0..256 {
            let joined: Vec<bf16> = parts.iter().flat_map(|part| part[row * width..][..width].to_vec()).collect();
            assert_eq!(joined, all[row * 128..][..128]);
        }
    }
}

#[test]
fn asking_for_another_shape_is_an_error() {
    let checkpoint = Copy::target().open().unwrap();
    let problem = checkpoint.matrix("lm_head.weight", [256, 4096]).unwrap_err();
    assert_names(&problem, SHARD_2, "lm_head.weight", "BF16 [4096, 256]", "BF16 [256, 4096]");
    assert!(checkpoint.vector("no.such.tensor", 1).is_err());
    assert!(checkpoint.matrix("model.layers.1.mlp.gate.e_score_correction_bias", [1, 32]).is_err());
}

#[test]
fn names_without_the_wrapper_prefix_are_the_same_model() {
    let copy = Copy::target();
    for shard in [SHARD_1, SHARD_2] {
        copy.rewrite(shard, |header, _| {
            *header = header.iter().map(|(k, v)| (k.trim_start_matches("language_model.").to_string(), v.clone())).collect();
        });
    }
    copy.index(|map| *map = map.iter().map(|(k, v)| (k.trim_start_matches("language_model.").to_string(), v.clone())).collect());
    copy.open().unwrap();
}

#[test]
fn a_missing_shard_is_named_with_the_number_of_its_tensors() {
    let copy = Copy::target();
    fs::remove_file(copy.path(SHARD_2)).unwrap();
    assert_names(&copy.problem(), SHARD_2, "the shard", "no such file", "594");
    let problems = {
        let copy = Copy::target();
        fs::rename(copy.path(SHARD_2), copy.path("other.safetensors")).unwrap();
        copy.problems()
    };
    assert_eq!(problems.len(), 2, "{problems:#?}");
    assert_names(&problems[1], "other.safetensors", "the shard", "a further file", "index");
}

#[test]
fn an_index_that_names_a_shard_nobody_has_is_refused() {
    let copy = Copy::target();
    copy.index(|map| map[NORM] = json!("model-00003-of-000003.safetensors"));
    let problems = copy.problems();
    assert_names(&problems[0], SHARD_2, NORM, "BF16 [256]", "model-00003-of-000003");
    assert_names(&problems[1], "model-00003-of-000003.safetensors", "the shard", "no such file", "1 tensors");
    assert_eq!(problems.len(), 2, "{problems:#?}");
}

#[test]
fn an_index_cannot_lead_out_of_the_directory() {
    let copy = Copy::target();
    copy.index(|map| map[NORM] = json!("../../etc/passwd"));
    assert!(copy.problems().iter().any(|problem| problem.subject == "file name" && problem.found.contains("passwd")));
}

#[test]
fn a_tensor_the_index_promises_and_the_shard_lacks_is_named() {
    let copy = Copy::target();
    copy.remove(SHARD_2, NORM);
    assert_names(&copy.problem(), SHARD_2, NORM, "nothing", INDEX);
}

#[test]
fn a_tensor_missing_everywhere_is_named() {
    let copy = Copy::target();
    copy.remove(SHARD_2, NORM);
    copy.index(|map| _ = map.remove(NORM));
    assert_names(&copy.problem(), INDEX, "model.norm.weight", "nothing", "BF16 [256]");
}

#[test]
fn a_tensor_in_two_files_is_refused() {
    let copy = Copy::target();
    copy.add(SHARD_1, NORM, "BF16", &[256], &[0; 512], false);
    assert_names(&copy.problem(), SHARD_1, NORM, "BF16 [256]", SHARD_2);
    let copy = Copy::target();
    copy.add(SHARD_1, "model.norm.weight", "BF16", &[256], &[0; 512], true);
    assert_names(&copy.problem(), SHARD_2, NORM, "a second tensor", SHARD_1);
}

#[test]
fn surplus_tensors_are_named_and_empty_or_vision_ones_skipped() {
    let copy = Copy::target();
    copy.add(SHARD_1, "extra.weight", "BF16", &[2, 2], &[0; 8], true);
    assert_names(&copy.problem(), SHARD_1, "extra.weight", "BF16 [2, 2]", "nothing");

    let copy = Copy::target();
    copy.add(SHARD_1, "empty.weight", "BF16", &[0, 256], &[], true);
    copy.add(SHARD_1, "vision_tower.patch_embed.proj.weight", "BF16", &[2, 2], &[0; 8], true);
    copy.add(SHARD_1, "mm_projector.pre_norm.bias", "BF16", &[0], &[], true);
    let skipped = copy.open().unwrap().skipped;
    assert_eq!((skipped.tensors, skipped.bytes), (3, 8));
    assert!(skipped.notes.iter().any(|note| note.contains("vision")) && skipped.notes.iter().any(|note| note.contains("empty.weight")));
}

#[test]
fn a_shard_of_vision_tensors_need_not_be_there() {
    let copy = Copy::target();
    copy.index(|map| _ = map.insert("vision_tower.encoder.final_layernorm.bias".into(), json!("model-00003-of-000003.safetensors")));
    let skipped = copy.open().unwrap().skipped;
    assert!(skipped.notes.iter().any(|note| note.contains("not needed")), "{skipped:?}");
}

#[test]
fn a_wrong_shape_or_type_is_named() {
    let copy = Copy::target();
    copy.rewrite(SHARD_2, |header, _| header["language_model.lm_head.weight"]["shape"] = json!([256, 4096]));
    assert_names(&copy.problem(), SHARD_2, "lm_head.weight", "BF16 [256, 4096]", "BF16 [4096, 256]");
    let copy = Copy::target();
    copy.rewrite(SHARD_2, |header, _| header[NORM]["dtype"] = json!("F16"));
    assert_names(&copy.problem(), SHARD_2, "model.norm.weight", "F16 [256]", "BF16 [256]");
    let copy = Copy::target();
    let packed = "language_model.model.layers.2.mlp.experts.1.gate_proj.weight_packed";
    copy.rewrite(SHARD_2, |header, _| header[packed]["dtype"] = json!("U32"));
    assert_names(&copy.problem(), SHARD_2, "experts.1.gate_proj.weight_packed", "U32", "I32 [128, 32]");
}

#[test]
fn a_shape_may_be_written_in_64_bits() {
    let copy = Copy::target();
    let name = "language_model.model.layers.2.mlp.experts.1.gate_proj.weight_shape";
    copy.remove(SHARD_2, name);
    let bytes: Vec<u8> = [128_u64, 256].iter().flat_map(|size| size.to_le_bytes()).collect();
    copy.add(SHARD_2, name, "I64", &[2], &bytes, true);
    let checkpoint = copy.open().unwrap();
    checkpoint.int4("model.layers.2.mlp.experts.1.gate_proj", [128, 256]).unwrap();
    checkpoint.scan_values(&Silent).unwrap();
}

#[test]
fn a_shape_tensor_that_contradicts_its_matrix_is_refused() {
    let copy = Copy::target();
    let name = "model.layers.2.mlp.experts.1.gate_proj.weight_shape";
    copy.poke(SHARD_2, &format!("language_model.{name}"), 0, &256_u32.to_le_bytes());
    let checkpoint = copy.open().unwrap();
    let problem = checkpoint.int4("model.layers.2.mlp.experts.1.gate_proj", [128, 256]).unwrap_err();
    assert_names(&problem, SHARD_2, name, "[256, 256]", "[128, 256]");
    let scan = checkpoint.scan_values(&Silent).unwrap_err();
    assert_eq!(scan.list, [problem]);
}

#[test]
fn a_cut_file_is_refused_wherever_it_is_cut() {
    let whole = fs::read(models().join("k26-mini").join(SHARD_1)).unwrap();
    for (length, found) in [
        (0, "0 bytes"),
        (5, "5 bytes"),
        (8, "0 bytes, then the end of the file"),
        (1000, "992 bytes, then the end of the file"),
        (50_000, "bytes of data"),
        (whole.len() - 1, "bytes of data"),
    ] {
        let copy = Copy::target();
        fs::write(copy.path(SHARD_1), &whole[..length]).unwrap();
        let problem = copy.problem();
        assert_eq!(problem.file, SHARD_1);
        assert!(problem.found.contains(found), "cut at {length}: {problem}");
        if length == whole.len() - 1 {
            assert!(problem.subject.contains("model.layers.") && problem.wanted.contains("the file is cut"), "{problem}");
        }
    }
    let copy = Copy::target();
    fs::write(copy.path(SHARD_1), [&whole[..], &[0; 3]].concat()).unwrap();
    assert_names(&copy.problem(), SHARD_1, "the data", "bytes", "as the header says");
}

#[test]
fn a_header_that_is_no_header_is_refused() {
    let whole = fs::read(models().join("k26-mini").join(SHARD_1)).unwrap();
    for damage in [&b"\xff\xff\xff\xff\xff\xff\xff\xff"[..], b"\xf0\xa8\x00\x00\x00\x00\x00\x00[1, 2]"] {
        let copy = Copy::target();
        fs::write(copy.path(SHARD_1), [damage, &whole[damage.len()..]].concat()).unwrap();
        assert_names(&copy.problem(), SHARD_1, "the header", "", "");
    }
}

#[test]
fn overlaps_gaps_and_false_ranges_are_refused() {
    type Damage = fn(&mut Value);
    let cases: [(Damage, &str); 4] = [
        (|info| info["data_offsets"] = json!([0, 512]), "overlap"),
        (|info| info["data_offsets"][0] = json!(range(info).0 + 2), "gap"),
        (|info| info["data_offsets"] = json!([range(info).1, range(info).0]), "reversed"),
        (|info| info["data_offsets"][1] = json!(u32::MAX), "bytes of data"),
    ];
    for (damage, wanted) in cases {
        let copy = Copy::target();
        copy.rewrite(SHARD_2, |header, _| damage(&mut header[NORM]));
        let problems = copy.problems();
        assert!(problems.iter().any(|problem| problem.subject.contains(NORM) && problem.found.contains(wanted)), "{wanted}: {problems:#?}");
    }
    let copy = Copy::target();
    copy.rewrite(SHARD_2, |header, _| header[NORM]["shape"] = json!([u64::MAX, u64::MAX]));
    assert!(copy.problems().iter().any(|problem| problem.subject == NORM));
}

#[test]
fn all_findings_are_reported_together() {
    let copy = Copy::target();
    copy.remove(SHARD_2, NORM);
    copy.add(SHARD_1, "extra.weight", "BF16", &[2, 2], &[0; 8], true);
    copy.rewrite(SHARD_2, |header, _| header["language_model.lm_head.weight"]["shape"] = json!([256, 4096]));
    let subjects: Vec<String> = copy.problems().into_iter().map(|problem| problem.subject).collect();
    assert_eq!(subjects, [NORM, "lm_head.weight", "extra.weight"]);
}

#[test]
fn values_that_are_not_finite_are_found_in_every_kind_of_tensor() {
    let copy = Copy::target();
    let bias = "language_model.model.layers.1.mlp.gate.e_score_correction_bias";
    let scale = "language_model.model.layers.2.mlp.experts.31.down_proj.weight_scale";
    copy.poke(SHARD_1, "language_model.model.embed_tokens.weight", 2 * (256 * 4000 + 17), &bf16::NAN.to_le_bytes());
    copy.poke(SHARD_1, bias, 12, &f32::NEG_INFINITY.to_le_bytes());
    copy.poke(SHARD_2, scale, 2 * 9, &bf16::INFINITY.to_le_bytes());
    copy.poke(SHARD_2, NORM, 0, &[bf16::NAN.to_le_bytes(), bf16::NAN.to_le_bytes()].concat());
    let problems = copy.open().unwrap().scan_values(&Silent).unwrap_err().list;
    assert_eq!(problems.len(), 4, "{problems:#?}");
    assert_names(&problems[0], SHARD_1, "embed_tokens", "NaN at [4000, 17], 1 such", "finite");
    assert_names(&problems[1], SHARD_1, "e_score_correction_bias", "-inf at [0, 3]", "finite");
    assert_names(&problems[2], SHARD_2, "experts.31.down_proj.weight_scale", "inf at [2, 1]", "finite");
    assert_names(&problems[3], SHARD_2, "norm.weight", "NaN at [0, 0], 2 such", "finite");
}

#[test]
fn nibbles_of_another_convention_are_noticed() {
    let copy = Copy::target();
    let name = "language_model.model.layers.1.mlp.experts.0.gate_proj.weight_packed";
    copy.rewrite(SHARD_1, |header, data| {
        let (begin, end) = range(&header[name]);
        // Offset binary to two's complement: flip the highest bit of each nibble.
        data[begin..end].iter_mut().for_each(|byte| *byte ^= 0x88);
    });
    let problems = copy.open().unwrap().scan_values(&Silent).unwrap_err().list;
    assert_names(&problems[0], SHARD_1, "experts.0.gate_proj.weight_packed", "mean magnitude", "nibble = value + 8");
}

#[test]
fn a_single_file_needs_no_index() {
    let copy = Copy::of("k26-mini-dflash");
    let target = TargetConfig::load(&ModelSource::directory(models().join("k26-mini"))).unwrap();
    let draft = DraftConfig::load(&copy.source(), &target).unwrap();
    let open = || Checkpoint::open_drafter(&copy.source(), &draft);
    open().unwrap();
    copy.rewrite("model.safetensors", |header, _| {
        let rename = |name: &String| if name == "__metadata__" { name.clone() } else { format!("model.{name}") };
        *header = header.iter().map(|(k, v)| (rename(k), v.clone())).collect();
    });
    open().unwrap();
    copy.remove("model.safetensors", "model.hidden_norm.weight");
    assert_names(&open().err().unwrap().list[0], "model.safetensors", "hidden_norm.weight", "nothing", "BF16 [256]");
    copy.rewrite("model.safetensors", |header, _| header["model.fc.weight"]["shape"] = json!([768, 256]));
    let problems = open().err().unwrap().list;
    assert!(problems.iter().any(|problem| problem.subject == "fc.weight" && problem.found == "BF16 [768, 256]"), "{problems:#?}");
    fs::remove_file(copy.path("model.safetensors")).unwrap();
    assert_names(&open().err().unwrap().list[0], "model.safetensors", "weights", "no such file", "or model.safetensors");
}

#[test]
fn copies_of_the_targets_matrices_in_a_drafter_are_skipped() {
    let copy = Copy::of("k26-mini-dflash");
    copy.add("model.safetensors", "embed_tokens.weight", "BF16", &[2, 2], &[0; 8], false);
    let target = TargetConfig::load(&ModelSource::directory(models().join("k26-mini"))).unwrap();
    let draft = DraftConfig::load(&copy.source(), &target).unwrap();
    let checkpoint = Checkpoint::open(&copy.source(), Inventory::drafter(&draft)).unwrap();
    assert_eq!(checkpoint.skipped.tensors, 1);
}

/// Reads everything of a model directory as a start does, and says what is wrong first; `None` = it waits for ever.
fn first_problem(source: ModelSource) -> Option<String> {
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let read = || -> Result<(), Problems> {
            let config = TargetConfig::load(&source)?;
            Tokenizer::load(&source)?;
            Checkpoint::open_target(&source, &config).map(|_| ())
        };
        let _ = send.send(read().err().map(|problems| problems.to_string()).unwrap_or_default());
    });
    receive.recv_timeout(std::time::Duration::from_secs(20)).ok()
}

#[test]
fn what_is_no_file_is_refused_by_name_and_waited_for_by_nobody() {
    let names: Vec<String> = Copy::target().source().file_names().unwrap();
    let read: Vec<&String> = names.iter().filter(|name| name.ends_with(".json") || name.ends_with(".safetensors")).collect();
    assert!(read.len() > 3, "{names:?}");
    for name in read {
        let copy = Copy::target();
        let path = copy.path(name);
        fs::remove_file(&path).unwrap();
        let without = first_problem(copy.source()).unwrap();
        let c_path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: a path that ends with a zero byte.
        assert_eq!(unsafe { libc::mkfifo(c_path.as_ptr(), 0o600) }, 0);
        let found = first_problem(copy.source()).unwrap_or_else(|| panic!("{name}: a start waits for a pipe"));
        // A file that may be absent and that nobody reads is no problem.
        assert!(found.contains(&format!("{name}: the file: found a named pipe, wanted a regular file")) || found == without, "{found}");
        fs::remove_file(&path).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let found = first_problem(copy.source()).unwrap();
        assert!(found.contains(&format!("{name}: the file: found a socket, wanted a regular file")) || found == without, "{found}");
    }
}
