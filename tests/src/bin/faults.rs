//! Runs the fault table: `cargo run --release -p tests --bin faults -- --runs 50 --json faults.json`.
//!
//! `--transport socket|mmap|tcp|shm`, `--direction push|pull` (both when not given), `--only TEXT` takes the cells that have it
//! in their name, `--parallel N` runs so many cells at the same time.

use anyhow::{Context, bail};
use futures_util::StreamExt;
use tests::faults::{Cell, Direction, Report, Setup, run};

struct Options {
    runs: usize,
    parallel: usize,
    json: Option<String>,
    transport: String,
    directions: Vec<Direction>,
    only: Option<String>,
}

fn options() -> anyhow::Result<Options> {
    let mut options = Options {
        runs: 1,
        parallel: 2,
        json: None,
        transport: "socket".into(),
        directions: vec![Direction::Push, Direction::Pull],
        only: None,
    };
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().with_context(|| format!("{flag} needs a value"))?;
        let number = || value.parse().with_context(|| format!("{flag} is {value:?}, expected a number"));
        match flag.as_str() {
            "--runs" => options.runs = number()?,
            "--parallel" => options.parallel = number()?,
            "--json" => options.json = Some(value),
            "--transport" => options.transport = value,
            "--only" => options.only = Some(value),
            "--direction" => match value.as_str() {
                "push" => options.directions = vec![Direction::Push],
                "pull" => options.directions = vec![Direction::Pull],
                _ => bail!("--direction is {value:?}, expected push or pull"),
            },
            _ => bail!("{flag} is not known; see the top of this program's source"),
        }
    }
    Ok(options)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let options = options()?;
    let setup = Setup::new(&options.transport);
    let cells = options.directions.iter().flat_map(|&direction| Cell::all(direction));
    let wanted = |cell: &Cell| options.only.as_ref().is_none_or(|text| cell.to_string().contains(text));
    let runs = cells.filter(wanted).map(|cell| run(&setup, cell, options.runs));
    let reports: Vec<Report> = futures_util::stream::iter(runs)
        .buffered(options.parallel.max(1))
        .inspect(|report| {
            println!(
                "{:<44} {:>3} runs: {:>3} right, {:>3} clean errors, {:>3} broken, {:>3} without answer, {} wrong  {:.0} s",
                report.cell,
                report.runs,
                report.right,
                report.clean_errors,
                report.broken,
                report.no_answer,
                report.failures.len(),
                report.seconds
            );
            report.failures.iter().for_each(|failure| println!("    {failure}"));
        })
        .collect()
        .await;
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_string_pretty(&reports)?).with_context(|| path.clone())?;
    }
    let wrong: usize = reports.iter().map(|report| report.failures.len()).sum();
    if wrong > 0 {
        bail!("{wrong} runs went wrong");
    }
    Ok(())
}
