//! The walk: how far the target's own tokens lead down the draft tree. What it returns is what a round emits and commits.

use super::tree::Tree;

/// Follows the target's pick while it exists as a child. `picks[i]` is the target's token after row i (argmax or sample), one per
/// row. Writes the accepted rows into `path`, root first, and returns their number `n >= 1`. The round emits `token[path[1..n]]`
/// and then the bonus token `picks[path[n - 1]]`, which is the next anchor. `path` rises strictly and `path[d]` has depth d.
///
/// One pass suffices because parents precede children. A `path` too short for the tree only ends the walk early, which is still
/// exact: the pick of the last accepted row becomes the bonus token.
pub fn walk(tree: &Tree, picks: &[u32], path: &mut [u8]) -> usize {
    let (mut at, mut accepted) = (0, 1);
    path[0] = 0;
    for row in 1..tree.rows {
        if accepted < path.len() && usize::from(tree.parent[row]) == at && tree.token[row] == picks[at] {
            path[accepted] = row as u8;
            accepted += 1;
            at = row;
        }
    }
    accepted
}

#[cfg(test)]
mod tests {
    use super::super::budget::MAX_ROWS;
    use super::super::tree::Marginals;
    use super::*;
    use proptest::prelude::*;

    /// The definition: a child map per row.
    fn by_map(tree: &Tree, picks: &[u32]) -> Vec<u8> {
        let children: std::collections::HashMap<(usize, u32), u8> =
            (1..tree.rows).map(|row| ((usize::from(tree.parent[row]), tree.token[row]), row as u8)).collect();
        let mut path = vec![0u8];
        while let Some(&row) = children.get(&(usize::from(path[path.len() - 1]), picks[usize::from(path[path.len() - 1])])) {
            path.push(row);
        }
        path
    }

    proptest! {
        #[test]
        fn follows_the_picks_as_far_as_the_tree_goes(
            logprobs in prop::collection::vec(prop::collection::vec(-4.0f32..0.0, 4), 1..8),
            rows in 1usize..=MAX_ROWS,
            picks in prop::collection::vec(0u32..5, MAX_ROWS),
            room in 1usize..=MAX_ROWS,
        ) {
            let depths = logprobs.len();
            let mut flat = Vec::new();
            for mut row in logprobs {
                row.sort_by(|a, b| b.total_cmp(a));
                flat.extend(row);
            }
            let ids: Vec<u32> = (0..depths).flat_map(|d| (0..4).map(move |r| (r + d as u32) % 5)).collect();
            let mut tree = Tree::new(9);
            tree.grow(9, &Marginals { depths, k: 4, ids: &ids, logprobs: &flat }, rows);
            let mut path = [0; MAX_ROWS];
            let accepted = walk(&tree, &picks, &mut path);
            prop_assert_eq!(&path[..accepted], &by_map(&tree, &picks)[..]);
            for (depth, &row) in path[..accepted].iter().enumerate() {
                prop_assert_eq!(usize::from(tree.depth[usize::from(row)]), depth);
            }
            let mut short = vec![0; room];
            let cut = walk(&tree, &picks, &mut short);
            prop_assert_eq!(cut, accepted.min(room));
            prop_assert_eq!(&short[..cut], &path[..cut]);
        }
    }

    #[test]
    fn a_single_row_accepts_itself() {
        let mut path = [7; 1];
        assert_eq!(walk(&Tree::new(3), &[5], &mut path), 1);
        assert_eq!(path, [0]);
    }
}
