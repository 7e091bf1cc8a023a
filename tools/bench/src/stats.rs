//! Statistics of few, skewed samples: medians and what can be said of them without assuming how
//! they are distributed.

use serde::{Deserialize, Serialize};

/// Confidence that an interval is chosen for.
const CONFIDENCE: f64 = 0.95;

/// Fewer values have no useful confidence interval: that of four has a confidence of 87 %.
const INTERVAL_FROM: usize = 5;

/// A sample in numbers.
///
/// In files it is an array of its fields in this order, with six significant digits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "[f64; 9]", into = "[f64; 9]")]
pub struct SampleSummary {
    /// How many values there are.
    pub count: usize,
    /// The middle one, or the mean of the two in the middle.
    pub median: f64,
    /// The mean.
    pub mean: f64,
    /// Standard deviation of the sample (divided by count - 1); 0 for a single value.
    pub deviation: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// Lower end of the confidence interval of the median.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Chance that the interval holds the true median: 0.95 or a little more, but less where there
    /// are fewer than six values, for which it is all of them.
    pub confidence: f64,
}

impl From<[f64; 9]> for SampleSummary {
    fn from(fields: [f64; 9]) -> SampleSummary {
        let [count, median, mean, deviation, min, max, low, high, confidence] = fields;
        SampleSummary {
            count: count as usize,
            median,
            mean,
            deviation,
            min,
            max,
            low,
            high,
            confidence,
        }
    }
}

impl From<SampleSummary> for [f64; 9] {
    fn from(summary: SampleSummary) -> [f64; 9] {
        let SampleSummary { count, median, mean, deviation, min, max, low, high, confidence } =
            summary;
        [count as f64, median, mean, deviation, min, max, low, high, confidence].map(rounded)
    }
}

/// A number with six significant digits.
fn rounded(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

impl SampleSummary {
    /// Describes values; None if there are none.
    pub fn of(values: &[f64]) -> Option<SampleSummary> {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        let min = *sorted.first()?;
        let max = *sorted.last()?;
        let mean = sorted.iter().sum::<f64>() / count as f64;
        let squares: f64 = sorted.iter().map(|value| (value - mean).powi(2)).sum();
        let deviation = match count {
            1 => 0.0,
            _ => (squares / (count - 1) as f64).sqrt(),
        };
        let median = f64::midpoint(sorted[(count - 1) / 2], sorted[count / 2]);
        let (rank, confidence) = median_interval(count);
        let low = sorted[rank];
        let high = sorted[count - 1 - rank];
        Some(SampleSummary { count, median, mean, deviation, min, max, low, high, confidence })
    }

    /// The confidence interval of the median and its confidence, if there are enough values for
    /// one: five, which all lie in it.
    pub fn interval(&self) -> Option<(f64, f64, f64)> {
        (self.count >= INTERVAL_FROM).then_some((self.low, self.high, self.confidence))
    }

    /// Standard deviation in percent of the mean.
    pub fn deviation_percent(&self) -> f64 {
        if self.mean == 0.0 { 0.0 } else { 100.0 * self.deviation / self.mean.abs() }
    }
}

/// Index of the smallest value that belongs to the confidence interval of the median of `count`
/// values (its mirror is the largest), and the interval's confidence. The number of values below
/// the true median is binomial with chance one half, whatever the distribution.
fn median_interval(count: usize) -> (usize, f64) {
    if count > 1000 {
        // Powers of two leave the range of floating-point numbers; the normal distribution is near.
        let rank = (count as f64 - 1.96 * (count as f64).sqrt()) / 2.0 - 1.0;
        return (rank as usize, CONFIDENCE);
    }
    let mut term = 0.5_f64.powi(i32::try_from(count).unwrap_or(i32::MAX));
    let mut below = term;
    let mut best = (0, (1.0 - 2.0 * below).max(0.0));
    for rank in 1..count.div_ceil(2) {
        term *= (count + 1 - rank) as f64 / rank as f64;
        below += term;
        let confidence = 1.0 - 2.0 * below;
        if confidence < CONFIDENCE {
            break;
        }
        best = (rank, confidence);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn a_sample_is_described() {
        let summary = SampleSummary::of(&[4.0, 1.0, 3.0, 2.0, 10.0]).unwrap();
        assert_eq!((summary.count, summary.median, summary.mean), (5, 3.0, 4.0));
        assert!(close(summary.deviation, 12.5_f64.sqrt()));
        assert_eq!((summary.min, summary.max), (1.0, 10.0));
        assert!(close(summary.deviation_percent(), 100.0 * 12.5_f64.sqrt() / 4.0));
    }

    #[test]
    fn even_counts_have_two_in_the_middle() {
        assert_eq!(SampleSummary::of(&[1.0, 2.0, 4.0, 8.0]).unwrap().median, 3.0);
    }

    #[test]
    fn nothing_and_one_value() {
        assert_eq!(SampleSummary::of(&[]), None);
        assert_eq!(SampleSummary::of(&[f64::NAN]), None);
        let one = SampleSummary::of(&[2.0]).unwrap();
        assert_eq!((one.median, one.deviation, one.low, one.high), (2.0, 0.0, 2.0, 2.0));
        assert_eq!(one.confidence, 0.0);
    }

    #[test]
    fn intervals_are_those_of_the_tables() {
        // Ranks (from 1) of the usual tables for 95 %: n=6: 1..6, n=9: 2..8, n=10: 2..9, n=20: 6..15.
        assert!(close(median_interval(5).1, 1.0 - 2.0 / 32.0));
        assert_eq!(median_interval(5).0, 0);
        assert_eq!(median_interval(6).0, 0);
        assert!(close(median_interval(6).1, 1.0 - 2.0 / 64.0));
        assert_eq!(median_interval(9).0, 1);
        assert_eq!(median_interval(10).0, 1);
        assert!(close(median_interval(10).1, 1.0 - 2.0 * 11.0 / 1024.0));
        assert_eq!(median_interval(20).0, 5);
        let exact = median_interval(1000).0;
        let near = median_interval(1001).0;
        assert!(exact.abs_diff(near) <= 1, "{exact} {near}");
    }

    #[test]
    fn the_interval_holds_the_median() {
        let values: Vec<f64> = (0..9).map(f64::from).collect();
        let summary = SampleSummary::of(&values).unwrap();
        assert_eq!((summary.low, summary.median, summary.high), (1.0, 4.0, 7.0));
    }
}
