//! GB/s over size as a drawing: a line for each transport and direction, beside memory and plain TCP.

use std::fmt::Write;

use transfer::Direction;

use super::case::Shape;
use super::report::{Baseline, Point, Report};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 460.0;
/// Left, top, right, bottom.
const MARGIN: (f64, f64, f64, f64) = (60.0, 40.0, 210.0, 50.0);

const COLOURS: [&str; 8] =
    ["#1b6ca8", "#d1495b", "#2e933c", "#8e5ea2", "#e08e0b", "#0b8a8a", "#6b4226", "#555555"];

struct Line {
    name: String,
    dashed: bool,
    /// Bytes and GB/s.
    points: Vec<(f64, f64)>,
}

/// The drawing, as a document of its own.
pub fn draw(report: &Report) -> String {
    let lines = lines(report);
    let all = || lines.iter().flat_map(|line| &line.points);
    let top = all().map(|&(_, y)| y).fold(1.0, f64::max).ceil();
    let (low, high) = all().fold((f64::MAX, f64::MIN), |(low, high), &(x, _)| (low.min(x), high.max(x)));
    let (left, above, right, below) = MARGIN;
    let span = (high / low).log2().max(1.0);
    let x = |bytes: f64| left + (bytes / low).log2() / span * (WIDTH - left - right);
    let y = |rate: f64| HEIGHT - below - rate / top * (HEIGHT - above - below);

    let mut out = String::new();
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{left}\" y=\"22\" \
         font-size=\"15\">KV transfer between two processes, one descriptor a block (GB/s)</text>"
    );
    let step = (top / 6.0).ceil().max(1.0);
    for tick in (0..).map(|i| f64::from(i) * step).take_while(|&tick| tick <= top) {
        let (at, end) = (y(tick), WIDTH - right);
        let _ = writeln!(
            out,
            "<line x1=\"{left}\" x2=\"{end}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/><text x=\"{:.1}\" y=\"{:.1}\" \
             text-anchor=\"end\">{tick}</text>",
            left - 8.0,
            at + 4.0
        );
    }
    let mut sizes: Vec<(u32, u64)> = report.points.iter().map(|p| (p.tokens, p.bytes)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    for (tokens, bytes) in sizes {
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{tokens}</text>",
            x(bytes as f64),
            HEIGHT - below + 18.0
        );
    }
    let _ = writeln!(out, "<text x=\"{left}\" y=\"{}\">tokens</text>", HEIGHT - 10.0);
    for (index, line) in lines.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let dash = if line.dashed { " stroke-dasharray=\"6 4\"" } else { "" };
        let points: Vec<_> =
            line.points.iter().map(|&(bytes, rate)| format!("{:.1},{:.1}", x(bytes), y(rate))).collect();
        let legend = above + 20.0 * index as f64;
        let at = WIDTH - right + 16.0;
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>\n<line x1=\"{at}\" \
             x2=\"{}\" y1=\"{legend}\" y2=\"{legend}\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/><text x=\"{}\" \
             y=\"{}\">{}</text>",
            points.join(" "),
            at + 26.0,
            at + 34.0,
            legend + 4.0,
            line.name
        );
    }
    out + "</svg>"
}

fn lines(report: &Report) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    let shape =
        if report.settings.shape.contains(&Shape::Block) { Shape::Block } else { report.settings.shape[0] };
    for transport in &report.settings.transport {
        for direction in [Direction::Write, Direction::Read] {
            let of_line =
                |p: &&Point| p.transport == *transport && p.direction == direction && p.shape == shape;
            let mut points: Vec<_> =
                report.points.iter().filter(of_line).map(|p| (p.bytes as f64, p.gb_per_s())).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            if !points.is_empty() {
                let name = format!("{transport} {}", direction.as_str());
                lines.push(Line { name, dashed: direction == Direction::Read, points });
            }
        }
    }
    type Seconds = fn(&Baseline) -> f64;
    let seconds: [(&str, Seconds); 2] =
        [("memcpy", Baseline::memcpy_seconds), ("plain TCP", Baseline::tcp_seconds)];
    for (name, seconds) in seconds {
        let mut points: Vec<(f64, f64)> = Vec::new();
        for point in &report.points {
            let bytes = point.bytes as f64;
            if !points.iter().any(|&(known, _)| known == bytes) {
                points.push((bytes, bytes / seconds(&point.baseline) / 1e9));
            }
        }
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        lines.push(Line { name: name.into(), dashed: false, points });
    }
    lines
}
