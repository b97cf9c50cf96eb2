//! The router as request tasks and probes see it.

use super::*;
use crate::discovery::EventEndpoints;
use crate::discovery::tests::record;
use crate::router::policies::{KvPolicy, RoundRobin};
use crate::router::source::SourceCode;

fn config() -> RouterConfig {
    RouterConfig {
        policy: Box::new(KvPolicy::default()),
        model: "demo".into(),
        block_size: None,
        kv_events: true,
        kv_degrade: true,
        kv_events_required: false,
        kv_events_patience: Duration::ZERO,
        ttl: Duration::from_secs(120),
        predicted_ttl: None,
        index_bytes: 1 << 20,
        booking_lease: Duration::from_secs(300),
        disagg: DisaggPolicy::Auto,
        max_decode_share: None,
        max_prefill_tokens: None,
    }
}

fn publishing(id: u64) -> WorkerRecord {
    let events = EventEndpoints {
        endpoint: "tcp://127.0.0.1:1".into(),
        replay_endpoint: None,
        topic: String::new(),
        snapshot_url: None,
    };
    WorkerRecord { events: Some(events), ..record(&id.to_string(), id) }
}

fn silent(id: u64) -> WorkerRecord {
    record(&id.to_string(), id)
}

fn prompt(family: u32, tokens: usize) -> Prompt {
    let tokens: Vec<u32> = (0..tokens as u32).map(|at| family * 1000 + at).collect();
    Prompt::from_tokens(&tokens, None, 16)
}

fn store(router: &Router, id: u64, prompt: &Prompt) {
    router.apply(WorkerId(id), &[IndexChange::Store { parent: None, keys: prompt.keys.to_vec() }]);
    router.observed(WorkerId(id));
}

fn serve(router: &Arc<Router>, prompt: &Prompt) -> WorkerId {
    router.route(prompt, &[]).unwrap().choice().serve
}

/// rt-06: a worker that left is chosen no more, and nothing of it is left; nor when it comes back as another process.
#[test]
fn a_worker_that_left_takes_its_blocks_along() {
    let router = Router::new(config());
    let asked = prompt(1, 320);
    for id in [1, 2] {
        router.join(publishing(id)).unwrap();
        router.observed(WorkerId(id));
    }
    store(&router, 1, &asked);
    assert_eq!(serve(&router, &asked), WorkerId(1));
    router.leave(WorkerId(1));
    assert_eq!((serve(&router, &asked), router.sizes().exact_blocks), (WorkerId(2), 0));
    // Late events of a worker that is gone are nobody's.
    store(&router, 1, &asked);
    assert_eq!(router.sizes().exact_blocks, 0);
    // A new process at the old address: the old one is forgotten without having left.
    router.join(publishing(3)).unwrap();
    store(&router, 3, &asked);
    let again = WorkerRecord { worker_id: "3".into(), ..publishing(4) };
    router.join(again).unwrap();
    assert!(router.record(WorkerId(3)).is_none());
    assert_eq!(router.sizes().exact_blocks, 0);
}

/// rt-01: the alarm is there at once, the overlap is guessed, and events end both.
#[test]
fn without_events_a_worker_is_degraded_and_it_shows() {
    let router = Router::new(config());
    router.join(silent(1)).unwrap();
    router.join(publishing(2)).unwrap();
    assert_eq!(router.mismatches(), 1);
    assert_eq!(router.workers()[0].alarm, Some(SourceCode::PublisherDisabled));
    let asked = prompt(1, 320);
    let first = router.route(&asked, &[WorkerId(2)]).unwrap();
    assert_eq!((first.index(), first.predicted_tokens()), (IndexSource::Approximate, 0));
    drop(first);
    let again = router.route(&asked, &[]).unwrap();
    assert_eq!((again.choice().serve, again.predicted_tokens()), (WorkerId(1), 304));
    drop(again);
    // The second one says that it publishes, computes a prompt, and no event comes.
    router.route(&prompt(2, 320), &[WorkerId(1)]).unwrap().first_token();
    let alarms = router.tick();
    assert_eq!((alarms.len(), alarms[0].code), (1, SourceCode::NotObserved));
    assert_eq!(router.mismatches(), 2);
    router.observed(WorkerId(2));
    assert_eq!((router.mismatches(), router.workers()[1].index), (1, IndexSource::Events));
}

#[test]
fn events_can_be_required() {
    let router = Router::new(RouterConfig { kv_events_required: true, ..config() });
    router.join(silent(1)).unwrap();
    let refused = router.route(&prompt(1, 100), &[]).unwrap_err();
    assert!(matches!(refused, NoWorker::Unavailable { workers: 1, refused: 1, .. }), "{refused}");
    router.join(publishing(2)).unwrap();
    assert_eq!(serve(&router, &prompt(1, 100)), WorkerId(2));
}

/// rt-02: the first worker sets the size, another one is refused with both values, and may set it when nobody else is left.
#[test]
fn another_block_size_is_refused_with_both_values() {
    let router = Router::new(config());
    router.join(silent(1)).unwrap();
    let odd = WorkerRecord { block_size: Some(32), ..silent(2) };
    let expected = "its blocks have 32 tokens, those of the other workers 16";
    assert_eq!(router.join(odd.clone()).unwrap_err(), expected);
    assert_eq!(router.workers()[1].misfit.as_deref(), Some(expected));
    (0..20).for_each(|family| assert_eq!(serve(&router, &prompt(family, 500)), WorkerId(1)));
    router.set_condition(WorkerId(2), Condition::Ready);
    assert_eq!(router.workers()[1].condition, Condition::Refused);
    router.leave(WorkerId(1));
    assert_eq!((router.block_size(), serve(&router, &prompt(1, 500))), (32, WorkerId(2)));
    // What its events say later cannot be mended by its record.
    router.refuse(WorkerId(2), "its blocks have 8 tokens, those of the cluster 32".into());
    assert!(router.join(odd).is_err());
    let fixed = Router::new(RouterConfig { block_size: Some(32), ..config() });
    let reason = fixed.join(silent(1)).unwrap_err();
    assert_eq!(reason, "its blocks have 16 tokens, this router's 32 (--kv-cache-block-size)");
    let other = WorkerRecord { model: "other".into(), ..silent(3) };
    assert_eq!(router.join(other).unwrap_err(), "it serves model \"other\", this router \"demo\"");
}

/// rt-11: load is given up on every path, and a delivery that failed leaves nothing in the approximate index either.
#[test]
fn bookings_end_with_their_guard() {
    let router = Router::new(RouterConfig { kv_events: false, ..config() });
    router.join(silent(1)).unwrap();
    let asked = prompt(1, 320);
    let mut failed = router.route(&asked, &[]).unwrap();
    assert_eq!((router.load(WorkerId(1)).decode_blocks, router.sizes().recent_blocks), (20, 20));
    failed.undo();
    failed.undo();
    assert_eq!((router.load(WorkerId(1)), router.sizes().recent_blocks), (Load::default(), 0));
    drop(failed);
    let running = router.route(&asked, &[]).unwrap();
    running.first_token();
    running.generated(40);
    assert_eq!(router.load(WorkerId(1)), Load { prefill_tokens: 0, decode_blocks: 23, active_requests: 1 });
    drop(running);
    assert_eq!((router.load(WorkerId(1)), router.sizes().open_bookings), (Load::default(), 0));
    assert_eq!(router.sizes().recent_blocks, 20);
}

/// The published experiment without a network: 12 prefixes on two workers that hold 9, six times each.
#[test]
fn twelve_prefixes_stay_on_two_workers_that_hold_nine() {
    let router = Router::new(RouterConfig { kv_events: false, ..config() });
    for id in [1, 2] {
        router.join(WorkerRecord { capacity_blocks: Some(925), ..silent(id) }).unwrap();
    }
    let mut hits = 0;
    for round in 0..6_u32 {
        for at in 0..12_u32 {
            let booking = router.route(&prompt((at * 5 + round * 7) % 12, 1500), &[]).unwrap();
            hits += usize::from(booking.predicted_tokens() > 0);
            booking.first_token();
        }
    }
    assert_eq!(hits, 60);
}

#[test]
fn modes_without_overlap_keep_no_index() {
    let router = Router::new(RouterConfig { policy: Box::new(RoundRobin), ..config() });
    (1..=2).for_each(|id| router.join(silent(id)).unwrap());
    assert_eq!((router.mismatches(), router.uses_overlap(), router.wants_events()), (0, false, false));
    let turns: Vec<_> = (0..4).map(|_| serve(&router, &prompt(1, 320)).0).collect();
    assert!(turns == [1, 2, 1, 2] || turns == [2, 1, 2, 1], "{turns:?}");
    assert_eq!(router.sizes().recent_blocks, 0);
}

/// sch-08: a worker that seems to hold more than it can has lost removals on the way; it is said, so that it is read anew.
#[test]
fn more_blocks_than_the_pool_has_is_noticed() {
    let router = Router::new(config());
    router.join(WorkerRecord { capacity_blocks: Some(20), ..publishing(1) }).unwrap();
    let change = |family| [IndexChange::Store { parent: None, keys: prompt(family, 320).keys.to_vec() }];
    assert!(!router.apply(WorkerId(1), &change(1)).overfull);
    assert!(router.apply(WorkerId(1), &change(2)).overfull);
}

/// The KV of a small model was taken for as large as Qwen3-0.6B's until some of it was moved, which never happened since
/// moving seemed expensive.
#[test]
fn the_kv_of_another_model_was_taken_for_qwen3s() {
    let router = Router::new(config());
    let of = |id, role| WorkerRecord { role, kv_bytes_per_token: Some(1_024), ..silent(id) };
    router.join(of(1, crate::router::WorkerRole::Prefill)).unwrap();
    router.join(of(2, crate::router::WorkerRole::Decode)).unwrap();
    let bytes =
        |router: &Router| router.explain(&prompt(1, 320)).disagg.expect("there is a pair").transfer_bytes;
    assert_eq!(bytes(&router), 320.0 * 1_024.0);
    // Nor do figures of transfers that began with cached blocks change what is known exactly.
    router.set_speeds(WorkerId(2), Speeds { kv_bytes_per_token: Some(900.0), ..Speeds::default() });
    assert_eq!(bytes(&router), 320.0 * 1_024.0);
}

/// Who computes a prompt was decided with an assumed speed, though the worker had said its own.
#[test]
fn a_workers_own_word_of_its_speed_is_taken_until_it_is_measured() {
    let router = Router::new(config());
    let mut prefill = WorkerRecord { prefill_tokens_per_sec: Some(500.0), ..silent(1) };
    prefill.role = crate::router::WorkerRole::Prefill;
    let mut decode = silent(2);
    decode.role = crate::router::WorkerRole::Decode;
    router.join(prefill).unwrap();
    router.join(decode).unwrap();
    let speeds = |router: &Router| {
        let estimate = router.explain(&prompt(1, 320)).disagg.expect("there is a pair");
        (estimate.prefill_tokens_per_sec_there, estimate.measured)
    };
    router.set_speeds(WorkerId(1), Speeds::default());
    assert_eq!(speeds(&router), (500.0, false));
    let measured = |prefill| Speeds {
        prefill_tokens_per_sec: Some(prefill),
        link_bytes_per_sec: Some(1e9),
        kv_bytes_per_token: Some(1e5),
    };
    router.set_speeds(WorkerId(1), measured(700.0));
    router.set_speeds(WorkerId(2), measured(900.0));
    assert_eq!(speeds(&router), (700.0, true));
}
