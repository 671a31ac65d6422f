use kdtree::engine::contract::*;
use kdtree::engine::driver::*;
use kdtree::engine::options::*;
use kdtree::engine::start::*;
use kdtree::speculate::budget::Budget;
use std::sync::Arc;
struct O;
impl Observer for O {}
fn cpu() -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t) };
    t.tv_sec as f64 * 1e3 + t.tv_nsec as f64 / 1e6
}
fn main() {
    let o = EngineOptions {
        model: "models/k26-mini".into(),
        drafter: "models/k26-mini-dflash".into(),
        threads: std::env::args().nth(1).map_or(2, |x| x.parse().unwrap()),
        ..Default::default()
    };
    let p = Prepared::read(o).unwrap();
    let (_h, t) = p.start(
        Arc::new(O),
        Box::new(kdtree::model::progress::Silent),
        Box::new(|d: &mut dyn Driver| {
            let prompt = d.tokenizer().encode_prompt("Once upon a time there was a king who had three sons.");
            for b in [Budget::Off, Budget::Chain, Budget::Tree(8), Budget::Tree(16), Budget::Tree(32), Budget::Tree(64)] {
                let t = std::time::Instant::now();
                let c = cpu();
                let g = d.generate(vec![greedy(prompt.clone(), 200, Some(b))]).unwrap();
                let f = g[0].end.as_ref().unwrap();
                println!(
                    "cpu/round {:.3} {b}: {} tokens {:.1} ms, per round {:.3} ms, rounds {}  {:?}",
                    (cpu() - c) / f.speculation.rounds as f64,
                    g[0].tokens.len(),
                    t.elapsed().as_secs_f64() * 1e3,
                    f.timing.decode.as_secs_f64() * 1e3 / f.speculation.rounds.max(1) as f64,
                    f.speculation.rounds,
                    &g[0].text[..40]
                );
            }
            Err("x".into())
        }),
    );
    let _ = t.join();
}
