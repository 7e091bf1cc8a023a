//! How long requests took, counted in classes: any number of them in little memory.

use std::time::Duration;

use serde::Serialize;

/// Classes within each power of two: what is read from here is wrong by less than 1 %.
const FINE_BITS: u32 = 7;
const FINE: usize = 1 << FINE_BITS;
/// Powers of two of nanoseconds: 64 bits of them.
const CLASSES: usize = (65 - FINE_BITS as usize) * FINE;

/// A count for each class of times.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    counts: Vec<u64>,
    total: u64,
    longest: u64,
}

/// Percentiles of request times, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Percentiles {
    /// How many were counted.
    pub count: u64,
    /// Half of them.
    pub median_us: f64,
    /// 90 of 100.
    pub p90_us: f64,
    /// 99 of 100.
    pub p99_us: f64,
    /// 999 of 1000.
    pub p999_us: f64,
    /// The longest, exactly.
    pub max_us: f64,
}

impl Histogram {
    pub(super) fn new() -> Histogram {
        Histogram { counts: vec![0; CLASSES], total: 0, longest: 0 }
    }

    /// Counts a request.
    pub(super) fn add(&mut self, time: Duration) {
        // 584 years.
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.counts[class(nanoseconds)] += 1;
        self.total += 1;
        self.longest = self.longest.max(nanoseconds);
    }

    /// Counts what another one has counted.
    pub(super) fn merge(&mut self, other: &Histogram) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
        self.longest = self.longest.max(other.longest);
    }

    /// The figures; `None` if nothing was counted.
    pub(super) fn percentiles(&self) -> Option<Percentiles> {
        (self.total > 0).then(|| Percentiles {
            count: self.total,
            median_us: self.at(0.5),
            p90_us: self.at(0.9),
            p99_us: self.at(0.99),
            p999_us: self.at(0.999),
            max_us: self.longest as f64 / 1000.0,
        })
    }

    /// What a share of the requests did not exceed, in microseconds.
    fn at(&self, share: f64) -> f64 {
        let rank = ((self.total as f64 * share).ceil() as u64).clamp(1, self.total);
        let mut seen = 0;
        for (class, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return middle(class).min(self.longest as f64) / 1000.0;
            }
        }
        self.longest as f64 / 1000.0
    }
}

/// Numbers below `FINE` have a class each; from there on each power of two has `FINE` of them.
fn class(number: u64) -> usize {
    let power = number.max(1).ilog2().saturating_sub(FINE_BITS);
    // Below 2 * FINE after the shift.
    (power as usize * FINE) + (number >> power) as usize
}

/// The middle of a class.
fn middle(class: usize) -> f64 {
    let power = (class / FINE).saturating_sub(1);
    let step = (power as f64).exp2();
    (class - power * FINE) as f64 * step + (step - 1.0) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_follow_each_other_and_are_near_what_was_counted() {
        let mut last = 0;
        for number in (0..100_000).chain((17..64).map(|power| 1 << power)).chain([u64::MAX]) {
            let class = class(number);
            assert!(class >= last && class < CLASSES, "{number}: {class}");
            last = class;
            let off = (middle(class) - number as f64).abs();
            assert!(off <= number as f64 * 0.01, "{number} counted as {}", middle(class));
        }
    }

    #[test]
    fn percentiles_of_all_and_of_none() {
        let mut one = Histogram::new();
        let mut other = Histogram::new();
        assert_eq!(one.percentiles(), None);
        for number in 1..=1000 {
            let histogram = if number % 2 == 0 { &mut one } else { &mut other };
            histogram.add(Duration::from_micros(number));
        }
        one.merge(&other);
        let found = one.percentiles().unwrap();
        let near = |found: f64, wanted: f64| (found - wanted).abs() <= wanted * 0.01;
        assert_eq!(found.count, 1000);
        assert!(near(found.median_us, 500.0) && near(found.p90_us, 900.0), "{found:?}");
        assert!(near(found.p99_us, 990.0) && near(found.p999_us, 999.0), "{found:?}");
        assert_eq!(found.max_us, 1000.0);
    }
}
