//! What is done to whom, and when.

use std::fmt;

/// Which worker is hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    Prefill,
    Decode,
    /// The client leaves.
    Client,
}

/// Where the request is by then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It is on its way to the prefill worker.
    BeforeAdmission,
    /// It waits there behind another one.
    Queued,
    MidPrefill,
    MidTransfer,
    /// The client has its first token, its KV is under way.
    AfterFirstToken,
    MidDecode,
}

impl Stage {
    pub const ALL: [Self; 6] = [
        Self::BeforeAdmission,
        Self::Queued,
        Self::MidPrefill,
        Self::MidTransfer,
        Self::AfterFirstToken,
        Self::MidDecode,
    ];
}

/// Who moves the KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Push,
    Pull,
}

impl Direction {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Pull => "pull",
        }
    }
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL, then a new process at the same port.
    Kill(Victim, Stage),
    /// SIGSTOP for longer than the lease, then SIGCONT.
    Stop(Victim, Stage),
    /// SIGTERM, then a new process at the same port.
    Restart(Victim, Stage),
    ClientLeaves(Stage),
    /// Notifications of writes do not arrive.
    NoteLost,
    /// Transfers bring the bytes of other blocks.
    MixUp,
    PortTaken,
    /// The workers differ: in this flag of the decode worker, which the reason has to name so.
    Misfit { flag: &'static str, named: &'static str },
}

/// One line of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub fault: Fault,
    pub direction: Direction,
}

impl Cell {
    /// The whole table for one direction.
    pub fn all(direction: Direction) -> Vec<Self> {
        let victims = [Victim::Prefill, Victim::Decode];
        let on_workers = victims.iter().flat_map(|&victim| {
            Stage::ALL.iter().flat_map(move |&stage| {
                [Fault::Kill(victim, stage), Fault::Stop(victim, stage), Fault::Restart(victim, stage)]
            })
        });
        let clients = Stage::ALL.iter().map(|&stage| Fault::ClientLeaves(stage));
        let misfits = [
            ("--block-size 32", "block size"),
            ("--kv-cache-dtype bf16", "KV dtype"),
            ("--model tests/fixtures/tiny-random --served-model-name demo", "model"),
            ("--kv-layout-version 9", "KV layout version"),
        ];
        let misfits = misfits.iter().map(|&(flag, named)| Fault::Misfit { flag, named });
        let wire = match direction {
            Direction::Push => vec![Fault::NoteLost, Fault::MixUp],
            // Reads have no notifications.
            Direction::Pull => vec![Fault::MixUp],
        };
        let faults = on_workers.chain(clients).chain(wire).chain([Fault::PortTaken]).chain(misfits);
        faults.map(|fault| Self { fault, direction }).collect()
    }

    /// Where in its life the request is hit, if it is.
    pub fn stage(&self) -> Option<Stage> {
        match self.fault {
            Fault::Kill(_, stage) | Fault::Stop(_, stage) | Fault::Restart(_, stage) => Some(stage),
            Fault::ClientLeaves(stage) => Some(stage),
            _ => None,
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.direction.as_str())?;
        match self.fault {
            Fault::Kill(victim, stage) => write!(f, "kill -9 {victim:?} {stage:?}"),
            Fault::Stop(victim, stage) => write!(f, "SIGSTOP {victim:?} {stage:?}"),
            Fault::Restart(victim, stage) => write!(f, "restart {victim:?} {stage:?}"),
            Fault::ClientLeaves(stage) => write!(f, "client leaves {stage:?}"),
            Fault::NoteLost => f.write_str("notification lost"),
            Fault::MixUp => f.write_str("bytes of other blocks"),
            Fault::PortTaken => f.write_str("port taken"),
            Fault::Misfit { named, .. } => write!(f, "{named} differs"),
        }
    }
}
