//! The tables that UCX writes with `UCX_PROTO_INFO=y`, read line by line. Pure.
//!
//! ```text
//! +---------------------------------+---------+
//! | agent-name intra-node cfg#2               |
//! | remote memory write by ucp_put* from host memory to host |
//! +--------+-------------+--------------------+
//! | Range  | Description |       Config       |
//! +--------+-------------+--------------------+
//! | 0..inf | zero-copy   | cma/memory         |
//! +--------+-------------+--------------------+
//! ```

use crate::lane::Lane;
use crate::transport::Direction;

/// What precedes the text of UCX's complaints in its log.
pub const WARNING: [&str; 3] = [" WARN ", " ERROR ", " FATAL "];

/// What the tables said so far.
#[derive(Debug, Default)]
pub struct Tables {
    /// The table under way: to whom, and which way.
    connection: Option<String>,
    direction: Option<Direction>,
    /// By connection and direction; one entry for each, replaced by each further row, so that the row of the longest
    /// messages stays.
    found: Vec<(String, Direction, Lane)>,
}

impl Tables {
    /// Takes a line; false when it is not part of a table.
    pub fn line(&mut self, line: &str) -> bool {
        // After the time and the thread, each in brackets.
        let body = line.splitn(3, ']').nth(2).unwrap_or(line).trim();
        if body.starts_with('+') && body.ends_with('+') {
            return true;
        }
        let Some(body) = body.strip_prefix('|').and_then(|body| body.strip_suffix('|')) else {
            return false;
        };
        let cells: Vec<&str> = body.split('|').map(str::trim).collect();
        match cells[..] {
            [title] => self.title(title),
            [range, how, config] if range != "Range" => self.row(how, config),
            _ => {}
        }
        true
    }

    /// The first title of a table is the connection, the second the operation.
    fn title(&mut self, title: &str) {
        if title.contains(" cfg#") {
            self.connection = Some(title.to_owned());
            self.direction = None;
        } else {
            self.direction = match () {
                () if title.contains("ucp_put") => Some(Direction::Write),
                () if title.contains("ucp_get") => Some(Direction::Read),
                () => None,
            };
        }
    }

    fn row(&mut self, how: &str, config: &str) {
        let (Some(connection), Some(direction)) = (&self.connection, self.direction) else { return };
        // An agent tries itself first; that says nothing about its peers.
        if connection.contains(" self cfg#") || config.is_empty() {
            return;
        }
        let lane = Lane { carrier: config.to_owned(), how: how.to_owned() };
        let known = self.found.iter_mut().find(|(c, d, _)| c == connection && *d == direction);
        match known {
            Some(known) => known.2 = lane,
            None => self.found.push((connection.clone(), direction, lane)),
        }
    }

    /// The lane for `direction`; all of them where peers are reached in different ways.
    pub fn lane(&self, direction: Direction) -> Option<Lane> {
        let mut lanes: Vec<&Lane> = Vec::new();
        for (_, _, lane) in self.found.iter().filter(|(_, d, _)| *d == direction) {
            if !lanes.contains(&lane) {
                lanes.push(lane);
            }
        }
        let joined = |part: fn(&Lane) -> &str| {
            let mut parts: Vec<&str> = lanes.iter().map(|lane| part(lane)).collect();
            parts.dedup();
            parts.join(" or ")
        };
        (!lanes.is_empty()).then(|| Lane { carrier: joined(|l| &l.carrier), how: joined(|l| &l.how) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SELF: &str = "\
[1796046330.360367] [vm:20222:0]   +--------+-------------+-----------------------------------+
[1796046330.360367] [vm:20222:0]   | kvferry-0152f9135b9bd392-8576b8 self cfg#0               |
[1796046330.360367] [vm:20222:0]   | remote memory write by ucp_put* from host memory to host |
[1796046330.360367] [vm:20222:0]   +--------+-------------+-----------------------------------+
[1796046330.360367] [vm:20222:0]   | Range  | Description |              Config               |
[1796046330.360367] [vm:20222:0]   +--------+-------------+-----------------------------------+
[1796046330.360367] [vm:20222:0]   | 0..inf | zero-copy   | cma/memory                        |
[1796046330.360367] [vm:20222:0]   +--------+-------------+-----------------------------------+
";
    const PEER: &str = "\
[1796046330.5] [vm:20222:0]   | kvferry-0152f9135b9bd392-8576b8 intra-node cfg#2              |
[1796046330.5] [vm:20222:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1796046330.5] [vm:20222:0]   | Range  | Description |              Config               |
[1796046330.5] [vm:20222:0]   | 0..127 | software emulation | tcp/lo                     |
[1796046330.5] [vm:20222:0]   | 128..inf | software emulation | tcp/lo                   |
[1796046330.5] [vm:20222:0]   | kvferry-0152f9135b9bd392-8576b8 intra-node cfg#2              |
[1796046330.5] [vm:20222:0]   | active message by ucp_am_send* from host memory |
[1796046330.5] [vm:20222:0]   | 0..inf | short | tcp/eth0                                     |
";

    fn read(text: &str) -> Tables {
        let mut tables = Tables::default();
        for line in text.lines() {
            assert!(tables.line(line), "{line}");
        }
        tables
    }

    #[test]
    fn the_lane_to_peers_is_found_and_that_to_oneself_is_not() {
        let tables = read(&[SELF, PEER].concat());
        assert_eq!(tables.lane(Direction::Write), None);
        let lane = tables.lane(Direction::Read).unwrap();
        assert_eq!((lane.carrier.as_str(), lane.emulated()), ("tcp/lo", true));
    }

    #[test]
    fn different_connections_are_all_named() {
        let other = PEER.replace("intra-node cfg#2", "inter-node cfg#3").replace("tcp/lo", "tcp/eth0");
        let lane = read(&[PEER, &other].concat()).lane(Direction::Read).unwrap();
        assert_eq!(lane.carrier, "tcp/lo or tcp/eth0");
        assert_eq!(lane.transports().collect::<Vec<_>>(), ["tcp", "tcp"]);
    }

    #[test]
    fn other_lines_are_no_tables() {
        let line = "[1796046330.5] [vm:1:0]  ucp_context.c:1 UCX  WARN transports 'x' are not available";
        assert!(!Tables::default().line(line));
    }
}
