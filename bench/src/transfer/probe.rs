//! `bench transfer --probe`: the self-test that workers run when they are linked.

use serde::Serialize;
use transfer::{Direction, ProbeReport};

use super::protocol::{Answer, Command};
use super::{Args, pair};
use crate::error::Result;
use crate::output::write_json;
use crate::table::{Table, or_dash};

#[derive(Debug, Serialize)]
struct Probed {
    transport: String,
    /// Where the bytes do not go as the name promises.
    complaints: Vec<String>,
    #[serde(flatten)]
    report: ProbeReport,
}

pub async fn run(args: &Args, transports: &[String]) -> Result<()> {
    let mut all = Vec::new();
    for name in transports {
        let (mut caller, peer) = pair(args, name).await?;
        let Answer::Probed { report } = caller.ask(&Command::Probe { peer: 1 }).await? else {
            return Err(caller.nonsense("Probe"));
        };
        all.push(Probed { transport: name.clone(), complaints: report.complaints(name), report });
        caller.stop().await?;
        peer.stop().await?;
    }
    println!("{}", table(&all));
    all.iter().flat_map(|probed| &probed.complaints).for_each(|complaint| println!("warning: {complaint}"));
    write_json(args.json.as_deref(), &all)
}

fn table(all: &[Probed]) -> Table {
    let mut table = Table::new(&[
        "<transport",
        "connect us",
        "round trip us",
        "<direction",
        "1 block GB/s",
        "many GB/s",
        "blocks",
        "<lane",
        "took ms",
    ]);
    for Probed { transport, report, .. } in all {
        for direction in [Direction::Write, Direction::Read] {
            let rate = |one: bool| {
                let fits =
                    |m: &&transfer::probe::Measured| m.direction == direction && (m.blocks == 1) == one;
                report.measured.iter().find(fits)
            };
            table.row([
                transport.clone(),
                format!("{:.0}", report.connect.as_secs_f64() * 1e6),
                format!("{:.0}", report.round_trip.as_secs_f64() * 1e6),
                direction.as_str().to_owned(),
                or_dash(rate(true).map(|m| format!("{:.2}", m.gb_per_s()))),
                or_dash(rate(false).map(|m| format!("{:.2}", m.gb_per_s()))),
                or_dash(rate(false).map(|m| m.blocks.to_string())),
                or_dash(report.lane(direction).map(ToString::to_string)),
                format!("{:.0}", report.took.as_secs_f64() * 1e3),
            ]);
        }
    }
    table
}
