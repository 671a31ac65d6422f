//! What a draft tree promises: equal to the reference, optimal, ordered, and its mask the ancestors.

use super::*;
use proptest::prelude::*;
use serde_json::Value;

/// Sorted log-probabilities of a random instance and distinct ids per depth.
#[derive(Clone, Debug)]
struct Instance {
    depths: usize,
    k: usize,
    ids: Vec<u32>,
    logprobs: Vec<f32>,
}

impl Instance {
    fn marginals(&self) -> Marginals<'_> {
        Marginals { depths: self.depths, k: self.k, ids: &self.ids, logprobs: &self.logprobs }
    }

    fn grown(&self, rows: usize) -> Tree {
        let mut tree = Tree::new(0);
        tree.grow(1000, &self.marginals(), rows);
        tree
    }
}

/// Up to `depths` by `vocab` logits; small integers when `ties`, so that equal weights are common.
fn instances(depths: usize, vocab: usize, ties: bool) -> impl Strategy<Value = Instance> {
    let logit = if ties { (-2i8..2).prop_map(f32::from).boxed() } else { (-5.0f32..5.0).boxed() };
    (1..=depths, 1..=vocab).prop_flat_map(move |(depths, vocab)| {
        prop::collection::vec(logit.clone(), depths * vocab).prop_map(move |logits| {
            let (mut ids, mut logprobs) = (vec![0; depths * vocab], vec![0.0; depths * vocab]);
            marginals_from_logits(&logits, vocab, vocab, &mut ids, &mut logprobs);
            Instance { depths, k: vocab, ids, logprobs }
        })
    })
}

fn any_instance() -> impl Strategy<Value = Instance> {
    prop_oneof![instances(8, 70, false), instances(8, 12, true)]
}

/// Log-probabilities of all prefixes, best first.
fn all_prefixes(instance: &Instance) -> Vec<f64> {
    let (mut all, mut level) = (Vec::new(), vec![0.0]);
    for row in instance.logprobs.chunks(instance.k) {
        level = level.iter().flat_map(|w| row.iter().map(move |&own| w + f64::from(own))).collect();
        all.extend(&level);
    }
    all.sort_by(|a: &f64, b| b.total_cmp(a));
    all
}

/// The reference's search: a heap on (weight, rank tuple), as the golden vectors were made. Returns (token, parent, logprob).
fn reference(instance: &Instance, budget: usize) -> Vec<(u32, usize, f64)> {
    let lp = |d: usize, r: usize| f64::from(instance.logprobs[d * instance.k + r]);
    let (mut heap, mut nodes) = (vec![(lp(0, 0), vec![0usize], 0)], Vec::new());
    while !heap.is_empty() && nodes.len() < budget {
        let next = (0..heap.len()).min_by(|&a, &b| heap[b].0.total_cmp(&heap[a].0).then(heap[a].1.cmp(&heap[b].1))).unwrap();
        let (w, ranks, parent) = heap.swap_remove(next);
        let (d, r) = (ranks.len() - 1, ranks[ranks.len() - 1]);
        nodes.push((instance.ids[d * instance.k + r], parent, w));
        if r + 1 < instance.k {
            let sibling = [&ranks[..d], &[r + 1]].concat();
            heap.push((w - lp(d, r) + lp(d, r + 1), sibling, parent));
        }
        if d + 1 < instance.depths {
            heap.push((w + lp(d + 1, 0), [&ranks[..], &[0]].concat(), nodes.len()));
        }
    }
    nodes
}

proptest! {
    #[test]
    fn parents_come_first_and_siblings_fall(instance in any_instance(), rows in 1usize..=MAX_ROWS) {
        let tree = instance.grown(rows);
        prop_assert_eq!((tree.token[0], tree.parent[0], tree.depth[0], tree.logprob[0]), (1000, 0, 0, 0.0));
        for row in 1..tree.rows {
            let parent = usize::from(tree.parent[row]);
            prop_assert!(parent < row);
            prop_assert_eq!(tree.depth[row], tree.depth[parent] + 1);
            prop_assert!(tree.logprob[row] <= tree.logprob[parent]);
            for elder in (1..row).filter(|&elder| tree.parent[elder] == tree.parent[row]) {
                prop_assert!(tree.logprob[elder] >= tree.logprob[row]);
                prop_assert!(tree.token[elder] != tree.token[row]);
            }
        }
    }

    #[test]
    fn the_mask_is_the_parents_mask_and_the_row(instance in any_instance(), rows in 1usize..=MAX_ROWS) {
        let tree = instance.grown(rows);
        prop_assert_eq!(tree.ancestors[0], 1);
        for row in 1..tree.rows {
            prop_assert_eq!(tree.ancestors[row], tree.ancestors[usize::from(tree.parent[row])] | 1 << row);
            prop_assert_eq!(tree.ancestors[row].count_ones(), u32::from(tree.depth[row]) + 1);
        }
    }

    #[test]
    fn path_tokens_spell_the_way_down(instance in any_instance(), rows in 1usize..=MAX_ROWS) {
        let tree = instance.grown(rows);
        let mut tokens = [0; MAX_ROWS];
        for row in 0..tree.rows {
            let on_path = (1..tree.rows).filter(|other| tree.ancestors[row] >> other & 1 == 1).map(|other| tree.token[other]);
            prop_assert_eq!(tree.path_tokens(row, &mut tokens).to_vec(), on_path.collect::<Vec<_>>());
        }
    }

    #[test]
    fn holds_the_most_probable_prefixes(instance in instances(4, 6, false), rows in 1usize..=MAX_ROWS) {
        let (tree, all) = (instance.grown(rows), all_prefixes(&instance));
        prop_assert_eq!(tree.rows, rows.min(all.len() + 1));
        let best: f64 = all[..tree.rows - 1].iter().map(|w| w.exp()).sum();
        prop_assert!((tree.expected() - best).abs() < 1e-9, "{} against {}", tree.expected(), best);
    }

    #[test]
    fn holds_the_most_probable_prefixes_among_ties(instance in instances(4, 6, true), rows in 1usize..=MAX_ROWS) {
        let (tree, all) = (instance.grown(rows), all_prefixes(&instance));
        let best: f64 = all[..tree.rows - 1].iter().map(|w| w.exp()).sum();
        prop_assert!((tree.expected() - best).abs() < 1e-9);
    }

    #[test]
    fn equals_the_reference_wherever_weights_differ(instance in instances(8, 70, false), rows in 1usize..=MAX_ROWS) {
        let (tree, nodes) = (instance.grown(rows), reference(&instance, rows - 1));
        prop_assume!(nodes.windows(2).all(|pair| pair[0].2 != pair[1].2));
        let grown: Vec<_> = (1..tree.rows).map(|row| (tree.token[row], usize::from(tree.parent[row]), tree.logprob[row])).collect();
        prop_assert_eq!(grown, nodes);
    }

    #[test]
    fn fewer_candidates_at_deeper_slots_lose_nothing(instance in any_instance(), rows in 2usize..=MAX_ROWS) {
        let whole = instance.grown(rows);
        let mut cut = instance.clone();
        for depth in 1..=cut.depths {
            let needed = rows.saturating_sub(depth).min(cut.k);
            cut.logprobs[(depth - 1) * cut.k + needed..depth * cut.k].fill(f32::NEG_INFINITY);
        }
        let cut = cut.grown(rows);
        prop_assert_eq!(cut.rows, whole.rows);
        prop_assert_eq!(&cut.token[..cut.rows], &whole.token[..cut.rows]);
        prop_assert_eq!(&cut.parent[..cut.rows], &whole.parent[..cut.rows]);
    }

    #[test]
    fn a_smaller_budget_is_a_prefix_of_a_larger_one(instance in any_instance(), rows in 1usize..=MAX_ROWS) {
        let (small, mut large) = (instance.grown(rows), instance.grown(MAX_ROWS));
        large.truncate(rows);
        prop_assert_eq!(small.rows, large.rows);
        prop_assert_eq!(&small.token[..small.rows], &large.token[..small.rows]);
        prop_assert_eq!(&small.parent[..small.rows], &large.parent[..small.rows]);
        prop_assert_eq!(small.expected(), large.expected());
    }

    #[test]
    fn a_chain_is_the_best_token_per_depth(instance in any_instance(), rows in 1usize..=MAX_ROWS) {
        let mut chain = Tree::new(0);
        chain.chain(1000, &instance.marginals(), rows);
        prop_assert_eq!(chain.rows, rows.min(instance.depths + 1));
        let mut weight = 0.0;
        for row in 1..chain.rows {
            weight += f64::from(instance.logprobs[(row - 1) * instance.k]);
            prop_assert_eq!(chain.token[row], instance.ids[(row - 1) * instance.k]);
            prop_assert_eq!((usize::from(chain.parent[row]), usize::from(chain.depth[row])), (row - 1, row));
            prop_assert_eq!((chain.ancestors[row], chain.logprob[row]), ((2u64 << row) - 1, weight));
        }
    }
}

#[test]
fn growth_leaves_nothing_of_the_round_before() {
    let logprobs = [-0.1, -2.0, -0.2, -2.0];
    let marginals = Marginals { depths: 2, k: 2, ids: &[1, 2, 3, 4], logprobs: &logprobs };
    let (mut used, mut fresh) = (Tree::new(0), Tree::new(0));
    used.grow(5, &marginals, MAX_ROWS);
    used.chain(6, &marginals, 3);
    used.grow(7, &marginals, 3);
    fresh.grow(7, &marginals, 3);
    assert_eq!(used.rows, 3);
    assert_eq!((&used.token[..3], &used.parent[..3], &used.ancestors[..3]), (&fresh.token[..3], &fresh.parent[..3], &fresh.ancestors[..3]));
    used.root(8);
    assert_eq!((used.rows, used.token[0], used.expected()), (1, 8, 0.0));
}

#[test]
fn drafts_that_are_not_numbers_end_as_plain_decoding() {
    let (mut ids, mut logprobs) = ([0; 6], [0.0; 6]);
    let logits = [0.0, f32::NAN, 1.0, f32::NEG_INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY];
    let marginals = marginals_from_logits(&logits, 3, 3, &mut ids, &mut logprobs);
    let mut tree = Tree::new(0);
    tree.grow(4, &marginals, 8);
    assert_eq!(tree.rows, 1);
    tree.chain(4, &marginals, 8);
    assert_eq!(tree.rows, 1);
    tree.grow(4, &Marginals { depths: 0, k: 0, ids: &[], logprobs: &[] }, 8);
    assert_eq!(tree.rows, 1);
}

#[test]
fn a_vocabulary_smaller_than_the_budget_ends_the_tree_short() {
    let (mut ids, mut logprobs) = ([0; 10], [0.0; 10]);
    let marginals = marginals_from_logits(&[0.0, 1.0, 0.5, 0.5], 2, 5, &mut ids, &mut logprobs);
    assert_eq!((marginals.depths, &marginals.ids[..2], &marginals.ids[5..7]), (2, &[1, 0][..], &[0, 1][..]));
    let mut tree = Tree::new(0);
    tree.grow(9, &marginals, 64);
    assert_eq!(tree.rows, 1 + 2 + 4);
    assert!((tree.expected() - 2.0).abs() < 1e-6, "every prefix of two depths is in");
}

/// Golden draft logits of every prompt with the reference's node lists.
fn golden() -> (Value, Vec<u8>) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/");
    let list = std::fs::read(format!("{folder}golden.json")).expect("golden.json");
    let tensors = std::fs::read(format!("{folder}golden.safetensors")).expect("golden.safetensors");
    (serde_json::from_slice(&list).expect("golden.json is JSON"), tensors)
}

#[test]
fn golden_draft_logits_give_the_golden_trees() {
    let (list, bytes) = golden();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut trees = 0;
    for entry in list.as_array().unwrap() {
        let name = entry["name"].as_str().unwrap();
        let view = tensors.tensor(&format!("{name}.draft_logits")).unwrap();
        let (depths, vocab) = (view.shape()[0], view.shape()[1]);
        let logits: Vec<f32> = view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let (mut ids, mut logprobs) = (vec![0; depths * 63], vec![0.0; depths * 63]);
        let marginals = marginals_from_logits(&logits, vocab, 63, &mut ids, &mut logprobs);
        let mut tree = Tree::new(0);
        for nodes in [7, 15, 31, 63] {
            tree.grow(0, &marginals, nodes + 1);
            let expected = entry["draft"][format!("tree{nodes}")].as_array().unwrap();
            assert_eq!(tree.rows, expected.len() + 1);
            for (row, node) in (1..).zip(expected) {
                let number = |key: &str| node[key].as_u64().unwrap();
                let found = (u64::from(tree.token[row]), u64::from(tree.parent[row]), u64::from(tree.depth[row]));
                assert_eq!(found, (number("token"), number("parent"), number("depth")), "{name}, {nodes} nodes, row {row}");
                let logprob = node["logprob"].as_f64().unwrap();
                assert!((tree.logprob[row] - logprob).abs() < 1e-4, "{name} row {row}: {} against {logprob}", tree.logprob[row]);
            }
            trees += 1;
        }
        tree.chain(0, &marginals, depths + 1);
        let chain: Vec<u64> = tree.token[1..tree.rows].iter().map(|&token| u64::from(token)).collect();
        assert_eq!(chain, entry["draft"]["chain"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect::<Vec<_>>());
    }
    assert_eq!(trees, 13 * 4);
}
