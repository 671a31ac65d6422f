//! The automatic budget against every fixed one, on simulated requests: several kinds of text, several kinds of machine.

use super::super::cost::Prior;
use super::super::population::{Population, Record};
use super::super::round_cost::{RoundCost, Size};
use super::super::tree::Marginals;
use super::super::uniform::uniform;
use super::super::walk::walk;
use super::*;

const BLOCK: usize = 8;
const DEPTHS: usize = BLOCK - 1;
const CANDIDATES: usize = 64;

/// A kind of text, by how the drafter does on it.
#[derive(Clone, Copy)]
struct Text {
    name: &'static str,
    /// Exponent of the drafter's Zipf marginals at the first slot in easy rounds, and in hard ones.
    sharpness: [f64; 2],
    /// Share of hard rounds.
    hard: f64,
    /// Loss of sharpness per slot.
    decay: f64,
    /// The truth follows the marginals to this power: below 1 the drafter is too sure of itself.
    honesty: f64,
    /// How often a slot's marginals hold after a token that was not the drafter's first choice.
    after_sibling: f64,
}

const TEXTS: [Text; 6] = [
    Text { name: "code", sharpness: [6.0, 3.0], hard: 0.2, decay: 0.95, honesty: 1.0, after_sibling: 1.0 },
    Text { name: "prose", sharpness: [2.2, 1.5], hard: 0.4, decay: 0.9, honesty: 1.0, after_sibling: 1.0 },
    Text { name: "noise", sharpness: [0.9, 0.7], hard: 0.5, decay: 0.8, honesty: 1.0, after_sibling: 1.0 },
    Text { name: "too sure", sharpness: [5.0, 4.0], hard: 0.3, decay: 0.95, honesty: 0.45, after_sibling: 1.0 },
    Text { name: "siblings mislead", sharpness: [3.0, 2.0], hard: 0.3, decay: 0.95, honesty: 1.0, after_sibling: 0.22 },
    Text { name: "hopeless", sharpness: [3.0, 3.0], hard: 0.0, decay: 1.0, honesty: 0.0, after_sibling: 0.0 },
];

/// Microseconds of a round of so many rows.
type Machine = fn(usize) -> f64;

const MACHINES: [(&str, Machine); 5] = [
    ("experts", |rows| 4_700.0 + 44_300.0 * (1.0 - (1.0f64 - 8.0 / 384.0).powf(rows as f64))),
    ("overhead", |rows| 12_000.0 + 20.0 * rows as f64),
    ("processor", |rows| 500.0 + 400.0 * rows as f64),
    ("tiles", |rows| 3_000.0 + 2_500.0 * rows.div_ceil(16) as f64),
    ("drafter too slow", |rows| if rows == 1 { 2_000.0 } else { 9_000.0 + 50.0 * rows as f64 }),
];

/// A round of one request.
fn alone(rows: usize) -> Size {
    Size { requests: 1, drafting: usize::from(rows > 1), rows }
}

/// A stream of random numbers.
pub(super) struct Random(pub u64, pub u64);

impl Random {
    pub fn next(&mut self) -> f64 {
        self.1 += 1;
        uniform(self.0, self.1)
    }
}

/// Probabilities that fall with the rank to this power.
fn zipf(exponent: f64) -> [f64; CANDIDATES] {
    let mut weights: [f64; CANDIDATES] = std::array::from_fn(|rank| (1.0 + rank as f64).powf(-exponent));
    let total: f64 = weights.iter().sum();
    weights.iter_mut().for_each(|w| *w /= total);
    weights
}

/// One round's draft, grown to the largest tree, and how each budget fares on it.
struct Round {
    tree: Tree,
    chain: Tree,
    /// Accepted rows of the largest tree; of the chain.
    path: Vec<u8>,
    chain_path: Vec<u8>,
}

impl Round {
    fn new(text: &Text, random: &mut Random) -> Self {
        let sharpness = text.sharpness[usize::from(random.next() < text.hard)];
        let (mut ids, mut logprobs, mut truth) = (Vec::new(), Vec::new(), [0u32; BLOCK]);
        let mut exponent = sharpness;
        for wanted in truth.iter_mut().take(DEPTHS) {
            let (drafter, target) = (zipf(exponent), zipf(exponent * text.honesty));
            logprobs.extend(drafter.iter().map(|p| p.ln() as f32));
            ids.extend(0..CANDIDATES as u32);
            let mut rest = random.next();
            let passed = |p: &&f64| {
                rest -= **p;
                rest >= 0.0
            };
            *wanted = target.iter().take_while(passed).count() as u32;
            exponent *= text.decay;
        }
        let marginals = Marginals { depths: DEPTHS, k: CANDIDATES, ids: &ids, logprobs: &logprobs };
        let holds: Vec<bool> = (0..BLOCK).map(|_| random.next() < text.after_sibling).collect();
        let (mut tree, mut chain) = (Tree::new(0), Tree::new(0));
        tree.grow(0, &marginals, MAX_ROWS);
        chain.chain(0, &marginals, BLOCK);
        let follow = |tree: &Tree| {
            let picks: Vec<u32> = (0..tree.rows)
                .map(|row| {
                    let depth = usize::from(tree.depth[row]);
                    if row == 0 || tree.token[row] == 0 || holds[depth] { truth[depth] } else { u32::MAX }
                })
                .collect();
            let mut path = [0; MAX_ROWS];
            let accepted = walk(tree, &picks, &mut path);
            path[..accepted].to_vec()
        };
        let (path, chain_path) = (follow(&tree), follow(&chain));
        Self { tree, chain, path, chain_path }
    }

    fn tokens(&self, budget: Budget, rows: usize) -> f64 {
        match budget {
            Budget::Chain => self.chain_path.len() as f64,
            _ => self.path.iter().filter(|&&row| usize::from(row) < rows).count() as f64,
        }
    }
}

/// Tokens and microseconds of the automatic budget and of every fixed one.
#[derive(Default)]
struct Score {
    auto: (f64, f64),
    fixed: Vec<(Budget, f64, f64)>,
}

impl Score {
    fn best(&self) -> (Budget, f64) {
        let rates = self.fixed.iter().map(|&(budget, tokens, micros)| (budget, tokens / micros));
        rates.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap()
    }

    fn share_of_best(&self) -> f64 {
        self.auto.0 / self.auto.1 / self.best().1
    }
}

struct Simulation {
    auto: AutoBudget,
    cost: RoundCost,
    random: Random,
    trim: bool,
}

impl Simulation {
    fn new(machine: Machine, seed: u64) -> Self {
        let prior = Prior { fixed_us: 3_000.0, experts_us: 30_000.0, experts: 384, active: 8, row_us: 0.0, token_us: 0.0 };
        let mut new =
            Self { auto: AutoBudget::new(BLOCK, MAX_ROWS), cost: RoundCost::new(prior, false), random: Random(seed, 0), trim: false };
        for rows in LADDER.into_iter().cycle().take(3 * LADDER.len()) {
            let micros = new.measured(machine, rows);
            new.cost.observe(alone(rows), 0, micros);
        }
        new
    }

    /// A measured time: three per cent of noise, and one round in twenty is far off.
    fn measured(&mut self, machine: Machine, rows: usize) -> f64 {
        let stray = if self.random.next() < 0.05 { 3.0 } else { 1.0 };
        machine(rows) * (0.97 + 0.06 * self.random.next()) * stray
    }

    /// Runs `rounds` rounds and scores them.
    fn run(&mut self, text: &Text, machine: Machine, rounds: usize) -> Score {
        let fixed = self.auto.choices().map(|budget| (budget, 0.0, 0.0)).collect();
        let mut score = Score { fixed, ..Score::default() };
        for _ in 0..rounds {
            let round = Round::new(text, &mut self.random);
            let budget = self.auto.choose(&self.cost, 0, Load::default());
            let (budget, rows) = match self.trim {
                true => {
                    let rows = self.auto.trim(&round.tree, &self.cost, 0, Load::default());
                    (Budget::Tree(rows as u8), rows)
                }
                false => (budget, self.auto.rows(budget)),
            };
            score.auto.0 += round.tokens(budget, rows);
            score.auto.1 += machine(rows);
            for (fixed, tokens, micros) in &mut score.fixed {
                let rows = self.auto.rows(*fixed);
                *tokens += round.tokens(*fixed, rows);
                *micros += machine(rows);
            }
            let micros = self.measured(machine, rows);
            self.cost.observe(alone(rows), 0, micros);
            self.tell(budget, rows, &round);
        }
        score
    }

    fn tell(&mut self, budget: Budget, rows: usize, round: &Round) {
        if budget == Budget::Chain {
            return self.auto.observe(budget, rows, &round.chain, &round.chain_path);
        }
        let mut tree = round.tree.clone();
        if !self.trim {
            tree.truncate(rows);
        }
        let path: Vec<u8> = round.path.iter().copied().filter(|&row| usize::from(row) < rows).collect();
        self.auto.observe(budget, rows, &tree, &path);
    }
}

#[test]
fn is_within_three_per_cent_of_the_best_fixed_budget() {
    let mut failures = Vec::new();
    for (n, text) in TEXTS.iter().enumerate() {
        for (name, machine) in MACHINES {
            let mut simulation = Simulation::new(machine, n as u64);
            simulation.run(text, machine, 300);
            let score = simulation.run(text, machine, 2000);
            println!("{:>18} on {name:<18} best {:<8} auto {:.3}", text.name, score.best().0.to_string(), score.share_of_best());
            if score.share_of_best() < 0.97 {
                failures.push(format!("{} on {name}: {:.3} of {}", text.name, score.share_of_best(), score.best().0));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn trimming_each_tree_is_as_good_and_better_where_rounds_differ() {
    let (mut gains, mut floors) = (Vec::new(), Vec::new());
    for (n, text) in TEXTS.iter().enumerate().take(4) {
        for (name, machine) in MACHINES {
            let mut simulation = Simulation::new(machine, n as u64);
            simulation.trim = true;
            simulation.run(text, machine, 300);
            let score = simulation.run(text, machine, 2000);
            println!("{:>18} on {name:<18} best {:<8} trim {:.3}", text.name, score.best().0.to_string(), score.share_of_best());
            gains.push(score.share_of_best());
            floors.push(if text.honesty < 1.0 { 0.95 } else { 0.98 });
        }
    }
    // Where the drafter is too sure of itself, a single tree's probabilities mislead more than their average does.
    assert!(gains.iter().zip(&floors).all(|(gain, floor)| gain > floor), "{gains:?}");
    assert!(gains.iter().any(|&gain| gain > 1.02), "{gains:?}");
}

#[test]
fn a_change_of_text_is_followed() {
    for (name, machine) in MACHINES {
        for (n, (from, to)) in [(2, 0), (0, 2), (5, 0), (0, 5), (1, 4)].into_iter().enumerate() {
            let mut simulation = Simulation::new(machine, 10 + n as u64);
            simulation.run(&TEXTS[from], machine, 1000);
            let early = simulation.run(&TEXTS[to], machine, 400).share_of_best();
            let late = simulation.run(&TEXTS[to], machine, 1000).share_of_best();
            println!("{:>18} to {:<18} on {name:<18} first 400 rounds {early:.3}, then {late:.3}", TEXTS[from].name, TEXTS[to].name);
            assert!(early > 0.6 && late > 0.96);
        }
    }
}

#[test]
fn a_change_of_speed_is_followed() {
    let (cheap_rows, dear_rows): (Machine, Machine) = (MACHINES[1].1, |rows| 12_000.0 + 900.0 * rows as f64);
    let slow: Machine = |rows| 5.0 * (12_000.0 + 20.0 * rows as f64);
    for (from, to) in [(cheap_rows, dear_rows), (dear_rows, cheap_rows), (slow, cheap_rows), (cheap_rows, slow)] {
        let mut simulation = Simulation::new(from, 20);
        simulation.run(&TEXTS[0], from, 1000);
        simulation.run(&TEXTS[0], to, 5000);
        let score = simulation.run(&TEXTS[0], to, 2000);
        assert!(score.share_of_best() > 0.97);
    }
}

#[test]
fn stays_within_what_the_round_can_still_carry() {
    let machine: Machine = |rows| if rows <= 64 { 5_000.0 } else { 500_000.0 };
    let mut simulation = Simulation::new(MACHINES[1].1, 30);
    simulation.run(&TEXTS[0], MACHINES[1].1, 300);
    let prior = Prior { fixed_us: 5_000.0, experts_us: 0.0, experts: 0, active: 0, row_us: 0.0, token_us: 0.0 };
    let mut cost = RoundCost::new(prior, false);
    for rows in (1..=64).chain([96, 128]) {
        (0..8).for_each(|_| cost.observe(alone(rows), 0, machine(rows)));
    }
    for (others, most) in [(0, 64), (32, 32), (56, 8), (63, 1)] {
        let load = Load { requests: others / 8, drafting: others / 8, rows: others, tokens: others as f64 / 4.0 };
        let budget = simulation.auto.clone().choose(&cost, 0, load);
        let rows = simulation.auto.rows(budget);
        assert!(rows <= most && (rows > most / 4), "{others} rows of others: {budget}");
    }
}

#[test]
fn never_exceeds_the_devices_rows() {
    for max_rows in 1..=MAX_ROWS {
        let auto = AutoBudget::new(BLOCK, max_rows);
        assert!(auto.choices().all(|budget| auto.rows(budget) <= max_rows));
    }
}

#[test]
fn an_heir_starts_as_its_class_and_learns_faster() {
    let machine = MACHINES[0].1;
    let mut class = Simulation::new(machine, 40);
    class.run(&TEXTS[0], machine, 500);
    let heir = class.auto.inherit(8.0);
    for budget in class.auto.choices() {
        let (own, inherited) = (class.auto.expected(budget), heir.expected(budget));
        assert!((own - inherited).abs() < 0.1 * own, "{budget}: {own} against {inherited}");
    }
    let mut young = Simulation { auto: heir, ..Simulation::new(machine, 41) };
    class.run(&TEXTS[2], machine, 30);
    young.run(&TEXTS[2], machine, 30);
    assert!(young.auto.expected(Budget::Tree(8)) < class.auto.expected(Budget::Tree(8)));
    assert_eq!(AutoBudget::new(BLOCK, MAX_ROWS).inherit(8.0).expected(Budget::Off), 1.0);
}

/// Requests of two kinds by turns, one in five of the first: share of the best fixed budget's speed that each kind reaches.
fn mixed(kinds: [&Text; 2], machine: Machine, rounds: usize) -> [f64; 2] {
    let mut simulation = Simulation::new(machine, 50);
    let mut population = Population::new(BLOCK, MAX_ROWS);
    let mut scores = [Score::default(), Score::default()];
    for request in 0..200 {
        let kind = usize::from(request % 5 > 0);
        let (mut auto, mut record) = (population.request(), Record::default());
        for _ in 0..rounds {
            let round = Round::new(kinds[kind], &mut simulation.random);
            let budget = auto.choose(&simulation.cost, 0, Load::default());
            let rows = auto.rows(budget);
            let score = &mut scores[kind];
            if request >= 50 {
                score.auto.0 += round.tokens(budget, rows);
                score.auto.1 += machine(rows);
                score.fixed.resize(auto.choices().count(), (Budget::Off, 0.0, 0.0));
                for (total, fixed) in score.fixed.iter_mut().zip(auto.choices()) {
                    let rows = auto.rows(fixed);
                    *total = (fixed, total.1 + round.tokens(fixed, rows), total.2 + machine(rows));
                }
            }
            let micros = simulation.measured(machine, rows);
            simulation.cost.observe(alone(rows), 0, micros);
            let mut tree = if budget == Budget::Chain { round.chain.clone() } else { round.tree.clone() };
            tree.truncate(rows);
            let path = if budget == Budget::Chain { &round.chain_path } else { &round.path };
            let path: Vec<u8> = path.iter().copied().filter(|&row| usize::from(row) < rows).collect();
            population.observe(&mut auto, &mut record, budget, rows, &tree, &path);
        }
        population.leave(&record);
    }
    scores.map(|score| score.share_of_best())
}

#[test]
fn a_request_that_drafts_well_is_found_among_many_that_do_not() {
    for (name, machine) in [MACHINES[0], MACHINES[2]] {
        let [few, many] = mixed([&TEXTS[0], &TEXTS[5]], machine, 40);
        println!("code among hopeless requests on {name}: {few:.3} of the best, the others {many:.3}");
        assert!(few > 0.85 && many > 0.87, "{name}: {few:.3} and {many:.3}");
    }
}

/// A card on which the drafter's pass is a step and rows come in powers of two: microseconds as measured with 1, 8 and 32 requests.
pub(super) fn card(size: Size) -> f64 {
    let by = |points: &[(f64, f64)]| {
        let x = (size.rows.next_power_of_two() as f64).log2();
        let at = points.partition_point(|&(knot, _)| knot < x).clamp(1, points.len() - 1);
        let ((a, low), (b, high)) = (points[at - 1], points[at]);
        low + (high - low) * ((x - a) / (b - a)).clamp(0.0, 1.0)
    };
    match size.drafting {
        0 => by(&[(0.0, 158.0), (3.0, 198.0), (5.0, 228.0)]),
        _ => by(&[(2.0, 270.0), (3.0, 284.0), (4.0, 303.0), (5.0, 325.0), (6.0, 360.0), (7.0, 410.0), (8.0, 550.0), (9.0, 700.0)]),
    }
}

/// Tokens per microsecond of `count` requests of 128 tokens at a time, all of `budget`, over the last `counted` of `passes`.
fn batch_on_a_card(count: usize, texts: &[Text], budget: Budget, passes: usize, counted: usize) -> f64 {
    let prior = Prior { fixed_us: 10.0, experts_us: 5.0, experts: 16, active: 2, row_us: 0.6, token_us: 0.0 };
    let (mut cost, mut random) = (RoundCost::new(prior, true), Random(70, 0));
    let mut population = Population::new(BLOCK, MAX_ROWS);
    // Warm-up: one request.
    for rows in LADDER.into_iter().flat_map(|rows| [rows; 3]) {
        cost.observe(alone(rows), 0, card(alone(rows)));
    }
    let cap = (512 / count).min(MAX_ROWS);
    let (mut tokens, mut micros) = (0.0, 0.0);
    for pass in 0..passes {
        let mut requests: Vec<(AutoBudget, Record, f64)> = (0..count).map(|_| (population.request(), Record::default(), 1.0)).collect();
        // Rounds in which all take part, as the bench counts.
        while requests.iter().all(|request| request.2 < 128.0) {
            let mut autos: Vec<&mut AutoBudget> = requests.iter_mut().map(|request| &mut request.0).collect();
            if budget == Budget::Auto {
                joint::choose(&mut autos, &cost.curves(0), Load::default(), cap);
            }
            let chosen: Vec<Budget> = autos.iter().map(|auto| if budget == Budget::Auto { auto.current() } else { budget }).collect();
            let rows: Vec<usize> = chosen.iter().zip(&autos).map(|(budget, auto)| auto.rows(*budget).min(cap)).collect();
            let drafting = rows.iter().filter(|&&rows| rows > 1).count();
            let size = Size { requests: count, drafting, rows: rows.iter().sum() };
            cost.observe(size, 0, card(size) * (0.98 + 0.06 * random.next()));
            let mut emitted = 0.0;
            for (at, (auto, record, done)) in requests.iter_mut().enumerate() {
                let (budget, rows) = (chosen[at], rows[at]);
                let round = Round::new(&texts[at % texts.len()], &mut random);
                let mut tree = if budget == Budget::Chain { round.chain.clone() } else { round.tree.clone() };
                tree.truncate(rows);
                let path = if budget == Budget::Chain { &round.chain_path } else { &round.path };
                let path: Vec<u8> = path.iter().copied().filter(|&row| usize::from(row) < rows).collect();
                population.observe(auto, record, budget, rows, &tree, &path);
                *done += path.len() as f64;
                emitted += path.len() as f64;
            }
            if pass >= passes - counted {
                tokens += emitted;
                micros += card(size);
            }
        }
        requests.iter().for_each(|(_, record, _)| population.leave(record));
    }
    tokens / micros
}

#[test]
fn requests_of_one_round_are_within_five_per_cent_of_their_best_common_budget() {
    let mut failures = Vec::new();
    for (name, texts) in [("prose", &TEXTS[1..2]), ("mixed", &TEXTS[..]), ("noise", &TEXTS[2..3])] {
        for count in [1, 8, 32] {
            let budgets = [Budget::Off, Budget::Chain].into_iter().chain(LADDER[1..].iter().map(|&rows| Budget::Tree(rows as u8)));
            let rates = budgets.map(|budget| (budget, batch_on_a_card(count, texts, budget, 3, 3)));
            let (best, most) = rates.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
            let share = batch_on_a_card(count, texts, Budget::Auto, 9, 6) / most;
            println!("{count:>3} requests of {name:<8}: best {best:<8} {most:.4}, auto {share:.3}");
            if share < 0.95 {
                failures.push(format!("{count} of {name}: {share:.3} of {best}"));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
