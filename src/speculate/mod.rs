//! DDTree: growing a draft tree from the drafter's marginals, its mask, the walk along the target's own tokens, and how many rows
//! are worth verifying. Plain functions over plain data: the CPU device calls them, the CUDA kernels are tested against them.

pub mod auto;
pub mod budget;
pub mod cost;
pub mod history;
pub mod joint;
pub mod population;
pub mod round_cost;
pub mod sampling;
pub mod top_k;
pub mod tree;
pub mod uniform;
pub mod walk;
