//! What a person sees while it runs: one line on a terminal, a line a round elsewhere.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use crate::result::RunFailure;

/// Shows on stderr what is going on.
pub struct RunProgress {
    quiet: bool,
    terminal: bool,
    rounds: u32,
    total: usize,
    done: usize,
    spent: Duration,
    last_round: Option<u32>,
}

impl RunProgress {
    /// A line on the terminal if stderr is one; with `quiet` only failures.
    pub fn new(quiet: bool) -> RunProgress {
        RunProgress {
            quiet,
            terminal: std::io::stderr().is_terminal(),
            rounds: 0,
            total: 0,
            done: 0,
            spent: Duration::ZERO,
            last_round: None,
        }
    }

    /// Something that happens before the runs.
    pub fn note(&mut self, what: &str) {
        self.line(what);
    }

    /// How much there is to do: rounds, and cells in each.
    pub fn start(&mut self, rounds: u32, cells: usize) {
        self.rounds = rounds;
        self.total = cells.saturating_mul(rounds as usize);
    }

    /// A run starts.
    pub fn run(&mut self, round: u32, warmup: u32, what: &str) {
        let new_round = self.last_round != Some(round);
        self.last_round = Some(round);
        let kind = if round < warmup { " (warm-up)" } else { "" };
        let percent = 100 * self.done / self.total.max(1);
        let left = match self.left() {
            Some(left) => format!(", {} left", short(left)),
            None => String::new(),
        };
        if self.terminal {
            let filled = percent / 5;
            let bar = "#".repeat(filled) + &".".repeat(20 - filled.min(20));
            self.line(&format!(
                "[{bar}] {percent:3}%{left}, round {}/{}{kind}, {what}",
                round + 1,
                self.rounds
            ));
        } else if new_round {
            self.line(&format!("round {}/{}{kind}{left}", round + 1, self.rounds));
        }
    }

    /// A run ended, after this time with all around it.
    pub fn done(&mut self, took: Duration) {
        self.done += 1;
        self.spent += took;
    }

    /// A run failed; with `given_up` its cell is not run again.
    pub fn failed(&mut self, what: &str, failure: &RunFailure, given_up: bool) {
        self.end();
        let more = if given_up { "; this cell is given up" } else { "" };
        let mut text = format!("{what}: {} failed: {}{more}\n", failure.stage, failure.why);
        if let Some(last) = failure.stderr.lines().last() {
            text.push_str(&format!("    {last}\n"));
        }
        show(&text);
    }

    /// Clears the line.
    pub fn end(&mut self) {
        if self.terminal && !self.quiet {
            show("\r\x1b[K");
        }
    }

    /// The remaining time at the current rate.
    fn left(&self) -> Option<Duration> {
        let done = u32::try_from(self.done).ok().filter(|done| *done > 0)?;
        let rest = u32::try_from(self.total.saturating_sub(self.done)).ok()?;
        Some(self.spent / done * rest)
    }

    fn line(&self, text: &str) {
        if self.quiet {
            return;
        }
        if self.terminal {
            // Longer lines would wrap, and the next one not replace them.
            show(&format!("\r\x1b[K{}", text.chars().take(100).collect::<String>()));
        } else {
            show(&format!("{text}\n"));
        }
    }
}

/// A time in the two largest units that matter.
fn short(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..=89 => format!("{seconds} s"),
        90..=5399 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

/// Progress that cannot be shown is no reason to stop measuring.
fn show(text: &str) {
    let mut stderr = std::io::stderr();
    stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush()).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_is_that_of_the_runs_so_far() {
        let mut progress = RunProgress::new(true);
        progress.start(2, 5);
        assert_eq!(progress.left(), None);
        progress.done(Duration::from_secs(3));
        progress.done(Duration::from_secs(5));
        assert_eq!(progress.left(), Some(Duration::from_secs(32)));
    }

    #[test]
    fn times_are_short() {
        assert_eq!(short(Duration::from_secs(80)), "80 s");
        assert_eq!(short(Duration::from_secs(200)), "3 min 20 s");
        assert_eq!(short(Duration::from_secs(7500)), "2 h 5 min");
    }
}
