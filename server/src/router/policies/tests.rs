use super::*;
use crate::router::policy::*;
use crate::router::view::*;
use crate::router::worker::*;

fn worker(id: u64, role: WorkerRole) -> WorkerView {
    WorkerView {
        id: WorkerId(id),
        role,
        condition: Condition::Ready,
        load: Load::default(),
        capacity_blocks: Some(1000),
        cached_blocks: 0,
        reused_blocks: 0,
        overlap_blocks: 0,
        active_blocks: 0,
        last_turn: 0,
        index: IndexSource::Events,
    }
}

fn cluster(workers: Vec<WorkerView>) -> ClusterView {
    ClusterView { workers }
}

/// A prompt of `tokens` tokens; policies read the overlap from the view, so that the names do not matter.
fn prompt(tokens: usize) -> RequestBlocks<'static> {
    RequestBlocks { keys: &[], num_tokens: tokens, block_size: 16 }
}

fn draw(turn: u64) -> Draw {
    Draw { turn, seed: turn.wrapping_mul(0x1234_5678_9abc_def1) }
}

fn all() -> Vec<Box<dyn RoutePolicy>> {
    let hot = KvPolicy { weights: KvWeights { temperature: 0.5, ..KvWeights::default() } };
    vec![
        Box::new(RoundRobin),
        Box::new(Random),
        Box::new(LeastLoaded),
        Box::new(PowerOfTwo),
        Box::new(KvPolicy::default()),
        Box::new(hot),
    ]
}

/// How often each of `count` workers is chosen in `turns` turns; the view learns nothing but whose turn was last.
fn counts(policy: &dyn RoutePolicy, count: u64, turns: u64, tokens: usize) -> Vec<usize> {
    let mut view = cluster((1..=count).map(|id| worker(id, WorkerRole::Both)).collect());
    let mut counts = vec![0; count as usize];
    for turn in 1..=turns {
        let choice = policy.choose(&prompt(tokens), &view, draw(turn)).unwrap();
        let index = choice.serve.0 as usize - 1;
        counts[index] += 1;
        view.workers[index].last_turn = turn;
    }
    counts
}

/// rt-08, rt-13: with nothing to tell idle workers apart, no one gets everything, whatever the prompt's length.
#[test]
fn idle_workers_share_the_load_in_every_mode() {
    for policy in all() {
        for tokens in [1, 5, 15, 16, 500] {
            for (index, count) in counts(&*policy, 4, 400, tokens).into_iter().enumerate() {
                assert!((60..=140).contains(&count), "{policy:?}: worker {index} got {count} of 400");
            }
        }
    }
}

#[test]
fn overlap_wins_over_an_idle_worker_and_loses_against_much_load() {
    let mut view = cluster(vec![worker(1, WorkerRole::Both), worker(2, WorkerRole::Both)]);
    view.workers[1].overlap_blocks = 60;
    let choose = |view: &ClusterView| KvPolicy::default().choose(&prompt(1000), view, draw(1)).unwrap();
    assert_eq!((choose(&view).serve, choose(&view).reason), (WorkerId(2), Reason::LowestCost));
    view.workers[1].load = Load { prefill_tokens: 900, decode_blocks: 0, active_requests: 1 };
    assert_eq!(choose(&view).serve, WorkerId(2));
    view.workers[1].load = Load { prefill_tokens: 1000, decode_blocks: 0, active_requests: 1 };
    assert_eq!(choose(&view).serve, WorkerId(1));
}

/// The figures of the formula in the module's documentation, by hand.
#[test]
fn costs_are_those_of_the_formula() {
    let mut view = cluster(vec![worker(1, WorkerRole::Both), worker(2, WorkerRole::Both)]);
    view.workers[0].load = Load { prefill_tokens: 160, decode_blocks: 7, active_requests: 3 };
    view.workers[0].overlap_blocks = 4;
    view.workers[0].active_blocks = 2;
    let weights = KvWeights {
        overlap_score_credit: 0.5,
        overlap_score_credit_decay: 1.0,
        prefill_load_scale: 2.0,
        eviction_weight: 0.0,
        decode_active_request_weight: 0.25,
        temperature: 0.0,
    };
    let choice = KvPolicy { weights }.choose(&prompt(160), &view, draw(1)).unwrap();
    // 20 blocks to compute; the excess of 10 over worker 2 halves the credit of 0.5 * 4.
    assert_eq!(choice.scores[0].prefill_blocks, 19.0);
    assert_eq!(choice.scores[0].decode_blocks, 7.0 + 10.0 - 2.0);
    assert_eq!(choice.scores[0].cost, 2.0 * 19.0 + 15.0 + 0.75);
    assert_eq!(choice.scores[1].cost, 2.0 * 10.0 + 10.0);
    assert_eq!(choice.serve, WorkerId(2));
}

/// The last token is always computed, so a block that ends with the prompt saves nothing.
#[test]
fn a_block_that_ends_with_the_prompt_is_no_overlap() {
    let mut view = cluster(vec![worker(1, WorkerRole::Both), worker(2, WorkerRole::Both)]);
    view.workers[0].overlap_blocks = 2;
    let choice = KvPolicy::default().choose(&prompt(32), &view, draw(1)).unwrap();
    assert_eq!(choice.scores[0].overlap_blocks, 1);
}

#[test]
fn prefill_goes_where_the_overlap_is_and_decode_where_the_room_is() {
    let mut view = cluster(vec![
        worker(1, WorkerRole::Prefill),
        worker(2, WorkerRole::Prefill),
        worker(3, WorkerRole::Decode),
        worker(4, WorkerRole::Decode),
    ]);
    view.workers[1].overlap_blocks = 10;
    view.workers[2].load.decode_blocks = 50;
    let choice = KvPolicy::default().choose(&prompt(320), &view, draw(1)).unwrap();
    assert_eq!((choice.serve, choice.prefill), (WorkerId(4), Some(WorkerId(2))));
    assert_eq!(choice.scores.len(), 4);
    // What the decode worker holds itself need not be sent.
    view.workers[2].overlap_blocks = 20;
    view.workers[2].load.decode_blocks = 10;
    view.workers[3].load.decode_blocks = 0;
    assert_eq!(KvPolicy::default().choose(&prompt(320), &view, draw(1)).unwrap().serve, WorkerId(3));
}

#[test]
fn without_prefill_workers_decode_workers_are_judged_as_computing_prompts() {
    let mut view = cluster(vec![worker(1, WorkerRole::Decode), worker(2, WorkerRole::Decode)]);
    view.workers[0].load.prefill_tokens = 1600;
    for policy in all().into_iter().filter(|policy| policy.name() == "kv") {
        let choice = policy.choose(&prompt(320), &view, draw(1)).unwrap();
        assert_eq!(choice.prefill, None);
        assert!(choice.scores[0].cost > choice.scores[1].cost);
    }
}

/// rt-06, rt-09: workers that take no requests are not chosen in any mode, by either leg; when there is none the reason is said.
#[test]
fn only_workers_that_take_requests_are_chosen() {
    let conditions = [Condition::Overloaded, Condition::Quarantined, Condition::Draining, Condition::Refused];
    for policy in all() {
        for condition in conditions {
            let mut view = cluster(vec![
                worker(1, WorkerRole::Decode),
                worker(2, WorkerRole::Decode),
                worker(3, WorkerRole::Prefill),
                worker(4, WorkerRole::Prefill),
            ]);
            for index in [0, 2] {
                view.workers[index].condition = condition;
                view.workers[index].overlap_blocks = 60;
            }
            for turn in 1..50 {
                let choice = policy.choose(&prompt(1000), &view, draw(turn)).unwrap();
                assert_eq!((choice.serve, choice.prefill), (WorkerId(2), Some(WorkerId(4))), "{policy:?}");
            }
            view.workers[1].condition = condition;
            let error = policy.choose(&prompt(1000), &view, draw(1)).unwrap_err();
            match condition {
                Condition::Overloaded => assert_eq!(error, NoWorker::Overloaded { workers: 2 }),
                _ => assert!(matches!(error, NoWorker::Unavailable { workers: 2, .. }), "{error}"),
            }
        }
        assert_eq!(policy.choose(&prompt(10), &cluster(vec![]), draw(1)), Err(NoWorker::Unknown));
        let prefill_only = cluster(vec![worker(1, WorkerRole::Prefill)]);
        assert_eq!(policy.choose(&prompt(10), &prefill_only, draw(1)), Err(NoWorker::Unknown));
    }
}

/// The published experiment needs it: 12 prefixes on two workers that hold 9 each must end 6 and 6.
#[test]
fn new_prefixes_go_where_the_cache_has_room() {
    let mut view = cluster(vec![worker(1, WorkerRole::Both), worker(2, WorkerRole::Both)]);
    let mut placed = [0, 0];
    for turn in 1..=12 {
        let choice = KvPolicy::default().choose(&prompt(1500), &view, draw(turn)).unwrap();
        let index = choice.serve.0 as usize - 1;
        placed[index] += 1;
        view.workers[index].cached_blocks += 93;
        // Requests for prefixes that are placed already come in between, all for the same worker.
        view.workers[0].last_turn = turn;
    }
    assert_eq!(placed, [6, 6]);
}

/// A prompt that was evicted everywhere went to whoever was idle, and pushed out one of the many that had their place there.
#[test]
fn a_prompt_without_a_place_goes_where_fewest_have_theirs() {
    let mut view = cluster((1..=3).map(|id| worker(id, WorkerRole::Both)).collect());
    for (worker, reused) in view.workers.iter_mut().zip([950, 600, 800]) {
        (worker.cached_blocks, worker.reused_blocks) = (1000, reused);
    }
    // It has most to do of the three, and all are full.
    view.workers[1].load = Load { prefill_tokens: 300, decode_blocks: 144, active_requests: 1 };
    let weights = KvWeights { prefill_load_scale: 3.0, eviction_weight: 10.0, ..KvWeights::default() };
    let choice = KvPolicy { weights }.choose(&prompt(4000), &view, draw(1)).unwrap();
    // 250 blocks, which would push out 250; of the first worker 200 that somebody came back for.
    assert_eq!((choice.serve, choice.scores[0].evicted_blocks), (WorkerId(2), 450.0));
    assert_eq!((choice.scores[1].evicted_blocks, choice.scores[2].evicted_blocks), (250.0, 300.0));
}

/// A half-filled small cache has less room than a half-filled large one has blocks.
#[test]
fn room_is_a_share_of_the_cache() {
    let mut view = cluster(vec![worker(1, WorkerRole::Both), worker(2, WorkerRole::Both)]);
    (view.workers[0].cached_blocks, view.workers[0].capacity_blocks) = (400, Some(1000));
    (view.workers[1].cached_blocks, view.workers[1].capacity_blocks) = (100, Some(200));
    assert_eq!(KvPolicy::default().choose(&prompt(1500), &view, draw(1)).unwrap().serve, WorkerId(1));
}

/// rt-13: nothing to divide by, and nothing that is not a number.
#[test]
fn scores_are_finite_for_empty_prompts_workers_and_blocks() {
    let mut view = cluster(vec![
        worker(1, WorkerRole::Both),
        worker(2, WorkerRole::Decode),
        worker(3, WorkerRole::Prefill),
    ]);
    view.workers[0].capacity_blocks = Some(0);
    view.workers[1].capacity_blocks = None;
    view.workers[2].load =
        Load { prefill_tokens: u64::MAX, decode_blocks: u64::MAX / 2, active_requests: u64::MAX };
    for policy in all() {
        for (num_tokens, block_size) in [(0, 16), (1, 16), (15, 16), (16, 16), (5, 0), (usize::MAX, 1)] {
            let request = RequestBlocks { keys: &[], num_tokens, block_size };
            let choice = policy.choose(&request, &view, draw(7)).unwrap();
            for score in &choice.scores {
                assert!(score.cost.is_finite() && score.prefill_blocks.is_finite(), "{policy:?}: {score:?}");
            }
        }
    }
    let heavy = KvWeights {
        prefill_load_scale: f64::MAX,
        eviction_weight: f64::MAX,
        decode_active_request_weight: f64::MAX,
        ..KvWeights::default()
    };
    let choice = KvPolicy { weights: heavy }.choose(&prompt(1000), &view, draw(1)).unwrap();
    assert!(choice.scores.iter().all(|score| score.cost.is_finite()));
}

/// Requests for a prefix that its worker holds left it while others ran there, and pushed other prefixes out where they went.
#[test]
fn a_prompt_stays_where_it_is_cached_while_all_caches_are_full() {
    let mut view = cluster(vec![worker(1, WorkerRole::Both), worker(2, WorkerRole::Both)]);
    view.workers[0].overlap_blocks = 125;
    let running = |requests: u64| Load {
        prefill_tokens: 304 * requests,
        decode_blocks: 144 * requests,
        active_requests: requests,
    };
    let choose = |view: &ClusterView, eviction_weight: f64| {
        let weights = KvWeights { prefill_load_scale: 3.0, eviction_weight, ..KvWeights::default() };
        KvPolicy { weights }.choose(&prompt(2300), view, draw(1)).unwrap()
    };
    view.workers[0].load = running(3);
    // There is room for it elsewhere.
    let choice = choose(&view, 6.0);
    assert_eq!((choice.serve, choice.scores[1].evicted_blocks), (WorkerId(2), 0.0));
    view.workers.iter_mut().for_each(|worker| worker.cached_blocks = 1000);
    assert_eq!(choose(&view, 0.0).serve, WorkerId(2));
    let choice = choose(&view, 6.0);
    assert_eq!((choice.serve, choice.scores[0].evicted_blocks), (WorkerId(1), 19.0));
    assert_eq!(choice.scores[1].evicted_blocks, 144.0);
    // But not whatever it costs.
    view.workers[0].load = running(12);
    assert_eq!(choose(&view, 6.0).serve, WorkerId(2));
    // Some room is there, and what is being computed will take it.
    view.workers[1].cached_blocks = 900;
    assert_eq!(choose(&view, 6.0).scores[1].evicted_blocks, 44.0);
    view.workers[1].load.prefill_tokens = 64 * 16;
    assert_eq!(choose(&view, 6.0).scores[1].evicted_blocks, 108.0);
    // A worker that does not say how much it can hold is not punished for it.
    view.workers[1].capacity_blocks = None;
    assert_eq!(choose(&view, 6.0).scores[1].evicted_blocks, 0.0);
}

/// Temperature works on the scaled costs: the same ratio of workers whatever the costs' size, and cold means the lowest.
#[test]
fn temperature_does_not_depend_on_the_size_of_the_costs() {
    let share = |tokens: usize, temperature: f64| {
        let mut view = cluster(vec![worker(1, WorkerRole::Both), worker(2, WorkerRole::Both)]);
        view.workers[0].overlap_blocks = tokens as u32 / 32;
        let policy = KvPolicy { weights: KvWeights { temperature, ..KvWeights::default() } };
        let first =
            |turn: &u64| policy.choose(&prompt(tokens), &view, draw(*turn)).unwrap().serve == WorkerId(1);
        (1..=4000).filter(first).count() as f64 / 4000.0
    };
    // Softmax of 0 and -1/T: 1 / (1 + e^-2) = 0.881 at T = 0.5.
    for tokens in [64, 6400, 640_000] {
        assert!((share(tokens, 0.5) - 0.881).abs() < 0.02, "{tokens}: {}", share(tokens, 0.5));
        assert!(share(tokens, 0.01) > 0.999);
        assert!((share(tokens, 1e9) - 0.5).abs() < 0.03);
    }
}
