//! The fault table, once; `bin/faults` runs it as often as wanted.

use tests::faults::{Cell, Direction, Setup, run};

async fn holds(direction: Direction, part: &str) {
    let setup = Setup::new("socket");
    let cells = Cell::all(direction).into_iter().filter(|cell| cell.to_string().contains(part));
    for cell in cells {
        let report = run(&setup, cell, 1).await;
        assert!(report.failures.is_empty(), "{report:?}");
    }
}

#[tokio::test]
async fn killed_workers_push() {
    holds(Direction::Push, "kill -9").await;
}

#[tokio::test]
async fn killed_workers_pull() {
    holds(Direction::Pull, "kill -9").await;
}

#[tokio::test]
async fn workers_that_stand_still_longer_than_the_lease_push() {
    holds(Direction::Push, "SIGSTOP").await;
}

#[tokio::test]
async fn workers_that_stand_still_longer_than_the_lease_pull() {
    holds(Direction::Pull, "SIGSTOP").await;
}

#[tokio::test]
async fn restarted_workers_push() {
    holds(Direction::Push, "restart").await;
}

#[tokio::test]
async fn restarted_workers_pull() {
    holds(Direction::Pull, "restart").await;
}

#[tokio::test]
async fn clients_that_leave_push() {
    holds(Direction::Push, "client leaves").await;
}

#[tokio::test]
async fn clients_that_leave_pull() {
    holds(Direction::Pull, "client leaves").await;
}

#[tokio::test]
async fn lost_notifications_bytes_of_other_blocks_and_a_taken_port() {
    holds(Direction::Push, "notification lost").await;
    holds(Direction::Push, "bytes of other blocks").await;
    holds(Direction::Pull, "bytes of other blocks").await;
    holds(Direction::Push, "port taken").await;
}

#[tokio::test]
async fn workers_that_differ() {
    holds(Direction::Push, "differs").await;
}
