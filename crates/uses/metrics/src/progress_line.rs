//! The state of copies as one line, for terminals and logs.

use blockhaul_engine::{MapCell, MapSnapshot, ProgressSnapshot};

use crate::copy_state::{CopySnapshot, is_verifying, position};

/// Cells of the bar.
const CELLS: usize = 40;
/// Maximum number of cells of a map.
const MAP_CELLS: usize = 128;

impl CopySnapshot {
    /// Percent of the bytes that are done; 100 only after success.
    pub fn percent(&self) -> u64 {
        percent(&self.all, success(self))
    }

    /// A bar and the text after it, in at most `columns` columns; 0: no limit. Data is `*`, zeroes
    /// and holes are `.`, what an earlier run has copied is `=`.
    pub fn bar(&self, columns: usize) -> String {
        bar(self, columns)
    }

    /// A map of the disk and the text after it, in at most `columns` columns; 0: no limit. A cell is
    /// `-` before its part of the disk is begun, `+` while it is being copied, and then shows what most
    /// of it was: `*` data, `.` zeroes and holes, `=` copied by an earlier run; `#` is verified.
    pub fn strip(&self, map: &MapSnapshot, columns: usize) -> String {
        strip(self, map, columns)
    }
}

/// Whether the command succeeded; `None` while it runs.
fn success(view: &CopySnapshot) -> Option<bool> {
    view.end.as_ref().map(|end| end.status == 0)
}

fn percent(now: &ProgressSnapshot, end: Option<bool>) -> u64 {
    match (end, now.total) {
        (Some(true), _) => 100,
        (_, 0) => 0,
        (_, total) => {
            let done = u128::from(now.done().min(total));
            u64::try_from(done * 100 / u128::from(total)).unwrap_or(100)
        }
    }
}

fn bar(view: &CopySnapshot, columns: usize) -> String {
    let now = &view.all;
    let end = success(view);
    let what = match is_verifying(now) {
        true => "verify ",
        false if now.is_preparing && now.done() == 0 => "preparing the target ",
        false => "",
    };
    let rate_text = format!("{}/s", rounded(view.rate));
    if now.total == 0 && end != Some(true) {
        return format!("{what}{} {rate_text}", rounded(now.done()));
    }
    let share = if now.total == 0 { 1.0 } else { position(now) as f64 / now.total as f64 };
    let share = if end == Some(true) { 1.0 } else { share };
    let disks = match view.named() {
        0 => String::new(),
        count => format!("{}/{count} disks ", view.complete()),
    };
    let rest = rest_of(view, end);
    let zeroes = rounded(now.zeroed + now.skipped);
    let before = match now.resumed {
        0 => String::new(),
        bytes => format!(", {} by an earlier run", rounded(bytes)),
    };
    let split = format!(" ({} data, {zeroes} zero{before})", rounded(now.data));
    let split = if view.is_copy() { split } else { String::new() };
    let line = |cells: usize, split: &str| {
        let cells = cells_of(now, share, cells);
        format!("{what}{disks}{:3}% [{cells}] {rest}{split}", (share * 100.0) as u64)
    };
    let fits = |line: &String| columns == 0 || line.chars().count() < columns;
    let lines = [line(CELLS, &split), line(CELLS / 2, &split), line(CELLS / 2, "")];
    let line = lines.into_iter().find(fits).unwrap_or_else(|| line(CELLS / 4, ""));
    match columns {
        0 => line,
        columns => line.chars().take(columns.saturating_sub(1).max(1)).collect(),
    }
}

/// The rate and the time that is left, and at the end the average rate.
fn rest_of(view: &CopySnapshot, end: Option<bool>) -> String {
    let now = &view.all;
    let rate = rate_text(view, view.rate, view.data_rate);
    match (end, view.eta()) {
        (Some(_), _) => {
            let seconds = view.elapsed.as_secs_f64();
            // What an earlier run has copied took none of this run's time.
            let copied = now.done().saturating_sub(now.resumed);
            let average = |bytes: u64| (bytes as f64 / seconds.max(0.001)) as u64;
            let verified = if is_verifying(now) { ", verified" } else { "" };
            let rate = rate_text(view, average(copied), average(now.data));
            format!("{} in {seconds:.1} s, {rate}{verified}", rounded(now.done()))
        }
        (None, Some(eta)) => format!("{rate} {} left", clock(eta)),
        (None, None) => rate,
    }
}

/// The rate of a copy, in bytes per second: that of its data, which limits are about, if holes make the other one
/// higher.
fn rate_text(view: &CopySnapshot, rate: u64, data_rate: u64) -> String {
    let has_holes = view.all.zeroed + view.all.skipped > 0;
    let is_verified_now = is_verifying(&view.all) && view.end.is_none();
    if view.is_copy() && has_holes && !is_verified_now && rate > data_rate / 100 * 105 {
        return format!("{}/s of data", rounded(data_rate));
    }
    format!("{}/s", rounded(rate))
}

fn strip(view: &CopySnapshot, map: &MapSnapshot, columns: usize) -> String {
    let rest = rest_of(view, success(view));
    let done = percent(&view.all, success(view));
    let around = 8 + rest.chars().count();
    let room = if columns == 0 { MAP_CELLS } else { columns.saturating_sub(around + 1) };
    let cells = cells_of_map(map, room.clamp(CELLS / 4, MAP_CELLS));
    let line = format!("{done:3}% [{cells}] {rest}");
    match columns {
        0 => line,
        columns => line.chars().take(columns.saturating_sub(1).max(1)).collect(),
    }
}

/// The cells of a map, in at most `most` characters.
fn cells_of_map(map: &MapSnapshot, most: usize) -> String {
    let merged = map.cells.len().div_ceil(most.max(1)).max(1);
    let parts = map.cells.chunks(merged).enumerate();
    let cells = parts.map(|(part, cells)| {
        let size: u64 = (0..cells.len()).map(|cell| map.len_of(part * merged + cell)).sum();
        let sum = |kind: fn(&MapCell) -> u64| cells.iter().map(kind).sum::<u64>();
        let data = sum(|cell| cell.data);
        let zero = sum(|cell| cell.zero);
        let resumed = sum(|cell| cell.resumed);
        match data.saturating_add(zero).saturating_add(resumed) {
            _ if size > 0 && sum(|cell| cell.verified) >= size => '#',
            0 => '-',
            done if done < size => '+',
            _ if resumed > data && resumed > zero => '=',
            _ if data >= zero => '*',
            _ => '.',
        }
    });
    cells.collect()
}

/// Cells filled up to this share, and divided by the kind of bytes.
fn cells_of(now: &ProgressSnapshot, share: f64, cells: usize) -> String {
    let filled = ((share * cells as f64) as usize).min(cells);
    let done = now.done().max(1) as f64;
    let part = |bytes: u64| ((bytes as f64 / done * filled as f64).round() as usize).min(filled);
    let resumed = part(now.resumed);
    let zeroes = match now.done() {
        0 => 0,
        _ => part(now.zeroed + now.skipped).min(filled - resumed),
    };
    let data = filled - resumed - zeroes;
    let pieces = [("=", resumed), ("*", data), (".", zeroes), ("-", cells - filled)];
    pieces.iter().map(|(cell, count)| cell.repeat(*count)).collect()
}

/// A size with about three digits.
fn rounded(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB", "TiB", "PiB"] {
        if value < 1024.0 {
            let decimals = usize::from(unit != "B" && value < 100.0);
            return format!("{value:.decimals$} {unit}");
        }
        value /= 1024.0;
    }
    format!("{value:.1} EiB")
}

fn clock(seconds: u64) -> String {
    let hours = seconds / 3600;
    let minutes = seconds / 60 % 60;
    let seconds = seconds % 60;
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CommandEnd, CopyObserver, ObservedCopy};
    use std::time::Duration;

    fn at(data: u64, total: u64) -> ProgressSnapshot {
        ProgressSnapshot { total, data, ..ProgressSnapshot::default() }
    }

    #[test]
    fn percentages_end_at_100_only_when_all_is_done() {
        assert_eq!(percent(&at(0, 0), None), 0);
        assert_eq!(percent(&at(0, 0), Some(true)), 100);
        assert_eq!(percent(&at(999, 1000), None), 99);
        assert_eq!(percent(&at(10, 1000), Some(false)), 1);
        assert_eq!(percent(&at(u64::MAX, i64::MAX as u64), None), 100);
    }

    fn view(all: ProgressSnapshot) -> CopySnapshot {
        let retried = [1, 2];
        CopySnapshot {
            all,
            rate: 1048576,
            in_flight: 3,
            retried,
            routes: vec![("zero", 7)],
            ..CopySnapshot::default()
        }
    }

    #[test]
    fn lines_are_short_and_json_is_json() {
        let half = view(at(512 << 20, 1 << 30));
        let line = bar(&half, 0);
        let cells = format!("{}{}", "*".repeat(20), "-".repeat(20));
        let split = "(512 MiB data, 0 B zero)";
        assert_eq!(line, format!(" 50% [{cells}] 1.0 MiB/s 8:32 left {split}"));
        for columns in [1, 5, 40, 60, 80, 200] {
            assert!(bar(&half, columns).chars().count() < columns.max(2));
        }
        assert!(bar(&half, 60).ends_with("8:32 left"));
        let line = half.json();
        assert_eq!((line["eta"].as_u64(), line["finished"].as_bool()), (Some(512), Some(false)));
        assert_eq!((&line["retries"]["target"], &line["routes"]["zero"]), (&2.into(), &7.into()));
        let ended = CopySnapshot { end: Some(CommandEnd::default()), ..view(at(5, 0)) };
        assert_eq!((&ended.json()["success"], &ended.json()["eta"]), (&true.into(), &().into()));
        assert_eq!(clock(3723), "1:02:03");
        assert_eq!(rounded(1536), "1.5 KiB");
    }

    /// Holes are no data, and a limit of the rate is one of data.
    #[test]
    fn the_rate_is_that_of_the_data() {
        let all = ProgressSnapshot { zeroed: 600 << 20, ..at(40 << 20, 1 << 30) };
        let view = CopySnapshot { rate: 640 << 20, data_rate: 40 << 20, ..view(all) };
        assert!(bar(&view, 0).contains("] 40.0 MiB/s of data 0:01 left ("), "{}", bar(&view, 0));
        let checked = CopySnapshot { command: "verify", ..view };
        assert!(bar(&checked, 0).contains("] 640 MiB/s 0:01 left"), "{}", bar(&checked, 0));
    }

    #[test]
    fn the_bar_tells_data_zeroes_and_earlier_runs_apart() {
        let now = ProgressSnapshot {
            total: 800,
            data: 100,
            zeroed: 60,
            skipped: 40,
            resumed: 200,
            ..ProgressSnapshot::default()
        };
        assert_eq!(cells_of(&now, 0.5, 16), "====**..--------");
        assert_eq!(cells_of(&ProgressSnapshot::default(), 0.0, 4), "----");
        assert_eq!(cells_of(&ProgressSnapshot::default(), 1.0, 4), "****");
    }

    #[test]
    fn the_last_line_says_what_an_earlier_run_has_copied() {
        let now = ProgressSnapshot {
            total: 4096,
            data: 1024,
            zeroed: 1024,
            resumed: 2048,
            ..ProgressSnapshot::default()
        };
        let view = CopySnapshot {
            all: now,
            elapsed: Duration::from_secs(2),
            end: Some(CommandEnd::default()),
            ..CopySnapshot::default()
        };
        let line = bar(&view, 0);
        assert!(
            line.contains("4.0 KiB in 2.0 s, 512 B/s of data (1.0 KiB data, 1.0 KiB zero, "),
            "{line}"
        );
        assert!(line.ends_with("2.0 KiB by an earlier run)"), "{line}");
    }

    #[test]
    fn a_target_that_is_prepared_is_a_phase() {
        let now = ProgressSnapshot { total: 10, is_preparing: true, ..ProgressSnapshot::default() };
        let view = CopySnapshot { all: now, ..CopySnapshot::default() };
        assert!(view.bar(0).starts_with("preparing the target   0% ["), "{}", view.bar(0));
        assert_eq!(view.json()["phase"], "prepare");
    }

    #[test]
    fn other_work_than_a_copy_has_the_name_of_its_command() {
        let view = CopySnapshot { command: "compare", ..view(at(5, 10)) };
        assert_eq!(
            (&view.json()["command"], &view.json()["phase"]),
            (&"compare".into(), &"compare".into())
        );
        assert!(!view.bar(0).contains("data"), "{}", view.bar(0));
    }

    #[test]
    fn completed_disks_are_counted() {
        let disk =
            |name: &str| ObservedCopy { name: Some(name.to_string()), ..ObservedCopy::default() };
        let watch = CopyObserver::new(vec![disk("a"), disk("b")], None);
        watch.disks()[1].progress.expect(30);
        let line = bar(&watch.view(), 0);
        assert!(line.starts_with("0/2 disks   0% [---"), "{line}");
    }
}
