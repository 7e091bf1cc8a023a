//! What the figures of the rounds say about the next one.

use serde::{Deserialize, Serialize};

/// Rounds from which the rate of the link is computed.
const RECENT: usize = 4;
/// The power of the time by which changes grow, before two increments show it.
const POWER_UNKNOWN: f64 = 0.5;

/// The figures of the copies of a round.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CopyFigures {
    /// Bytes that were written to the targets.
    pub bytes: u64,
    /// Bytes that were read.
    pub read: u64,
    /// Elapsed seconds.
    pub seconds: f64,
}

/// The figures of a round.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RoundFigures {
    /// Its number, from 1 on.
    pub number: u32,
    /// The disks that were copied in full, and why.
    pub full: Vec<(String, String)>,
    /// Bytes that were written to the targets.
    pub bytes: u64,
    /// Bytes that were read: more, if targets have some of them already.
    pub read: u64,
    /// Seconds that the provider took.
    pub make_seconds: f64,
    /// Seconds that the copies took.
    pub copy_seconds: f64,
    /// Seconds from the point in time before to this one, in which the bytes were written.
    pub interval: Option<f64>,
    /// The predicted downtime in seconds after this round.
    pub predicted: Option<f64>,
    /// The machine was stopped.
    pub last: bool,
}

impl RoundFigures {
    /// Whether all bytes are changes.
    pub fn is_increment(&self) -> bool {
        self.full.is_empty() && self.interval.is_some()
    }

    /// Bytes per second of the copies.
    pub fn rate(&self) -> f64 {
        self.read as f64 / self.copy_seconds.max(1e-6)
    }

    /// Bytes per second that the machine has changed.
    pub fn dirty_rate(&self) -> Option<f64> {
        let interval = self.interval.filter(|_| self.is_increment())?;
        Some(self.bytes as f64 / interval.max(1e-6))
    }
}

/// What rounds have in common.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LinkModel {
    /// Bytes per second.
    pub(crate) rate: f64,
    /// Seconds of a round that do not depend on its bytes.
    pub(crate) cost: f64,
}

/// The model of these rounds, if there are some.
pub(crate) fn link_model(rounds: &[RoundFigures]) -> Option<LinkModel> {
    let recent = &rounds[rounds.len().saturating_sub(RECENT)..];
    // The rate is that of the largest round: the cost of a round is a small part of its time.
    let largest = recent.iter().max_by_key(|round| round.read)?;
    let last = recent.last()?;
    let rate = largest.rate().max(1.0);
    let others: Vec<_> = recent.iter().filter(|round| round.number != largest.number).collect();
    let cost = |round: &RoundFigures| {
        round.make_seconds + (round.copy_seconds - round.read as f64 / rate).max(0.0)
    };
    let cost = match others.len() {
        0 => last.make_seconds,
        count => others.iter().map(|round| cost(round)).sum::<f64>() / count as f64,
    };
    Some(LinkModel { rate, cost })
}

/// Bytes that the machine changes in `seconds`. Blocks that are written again and again count once, so that the
/// bytes grow less than the time does: by a power of it, which the last two increments show. In a shorter time fewer
/// blocks are written twice, and the power is nearer to 1.
pub(crate) fn dirty_bytes(rounds: &[RoundFigures], seconds: f64) -> Option<f64> {
    let mut increments = rounds.iter().rev().filter(|round| round.is_increment());
    let pair = |round: &RoundFigures| Some((round.interval?.max(1e-3), round.bytes as f64));
    let (time, bytes) = increments.next().and_then(pair)?;
    let factor = seconds.max(0.0) / time;
    let power = match increments.next().and_then(pair) {
        None => POWER_UNKNOWN,
        Some((earlier, more)) if earlier > 1.2 * time && more > bytes && bytes > 0.0 => {
            let power = ((more / bytes).ln() / (earlier / time).ln()).clamp(0.3, 1.0);
            if factor < 1.0 { (power + 1.0) / 2.0 } else { power }
        }
        Some(_) => 1.0,
    };
    Some(bytes * factor.powf(power))
}

/// The seconds from now to the end of the last round, if the machine is stopped now, `since` seconds after the last point
/// in time. `verified`: bytes that are read again, besides those of the last round; `None`: nothing is. The times of the
/// commands that stop and start the machine are not in it. `None` before the first increment.
pub fn predict(rounds: &[RoundFigures], since: f64, verified: Option<u64>) -> Option<f64> {
    let LinkModel { rate, cost } = link_model(rounds)?;
    let bytes = dirty_bytes(rounds, since)?;
    let again = match verified {
        None => 0.0,
        Some(0) => bytes,
        Some(all) => all as f64,
    };
    Some(cost + (bytes + again) / rate)
}
