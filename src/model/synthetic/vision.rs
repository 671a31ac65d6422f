//! Names and shapes of K2.5's vision tower (MoonViT) and projector, which a text server passes over: 335 tensors, 942,287,840 bytes.

use super::shards::Entry;

const HIDDEN: usize = 1152;
const MLP: usize = 4304;
const BLOCKS: usize = 27;
/// Four neighbouring patches are merged before the projector.
const MERGED: usize = 4 * HIDDEN;
const TEXT_HIDDEN: usize = 7168;

/// Every tensor of the vision tower and its projector, as holes.
pub fn tensors() -> Vec<Entry> {
    let mut list = vec![
        Entry::bf16_hole("vision_tower.patch_embed.proj.weight".into(), &[HIDDEN, 3, 14, 14]),
        Entry::bf16_hole("vision_tower.patch_embed.proj.bias".into(), &[HIDDEN]),
        Entry::bf16_hole("vision_tower.patch_embed.pos_emb.weight".into(), &[64, 64, HIDDEN]),
    ];
    let mut linear = |name: String, shape: &[usize]| {
        list.push(Entry::bf16_hole(format!("{name}.bias"), &shape[..1]));
        list.push(Entry::bf16_hole(format!("{name}.weight"), shape));
    };
    for block in 0..BLOCKS {
        let name = |part: &str| format!("vision_tower.encoder.blocks.{block}.{part}");
        linear(name("norm0"), &[HIDDEN]);
        linear(name("norm1"), &[HIDDEN]);
        linear(name("wqkv"), &[3 * HIDDEN, HIDDEN]);
        linear(name("wo"), &[HIDDEN, HIDDEN]);
        linear(name("mlp.fc0"), &[MLP, HIDDEN]);
        linear(name("mlp.fc1"), &[HIDDEN, MLP]);
    }
    linear("vision_tower.encoder.final_layernorm".into(), &[HIDDEN]);
    linear("mm_projector.pre_norm".into(), &[HIDDEN]);
    linear("mm_projector.proj.0".into(), &[MERGED, MERGED]);
    linear("mm_projector.proj.2".into(), &[TEXT_HIDDEN, MERGED]);
    list
}
