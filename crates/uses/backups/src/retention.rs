//! Which points in time are kept: the last ones, and the newest of each day, week, month and year.
//!
//! The rules are those of restic's `forget`, so that a policy means the same for each kind of store. Periods are those
//! of the calendar, in the time zone of each time; a week begins on Monday. Only periods with a time count. The newest
//! time of each period is kept; if there are fewer periods than a rule may keep, the oldest time is kept, too.

use std::fmt;
use std::str::FromStr;

use jiff::{Span, Zoned};

/// The number of times that a rule keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeepCount {
    /// No time: the rule is not in use.
    #[default]
    None,
    /// At most this many, from 1.
    Last(u32),
    /// All.
    Unlimited,
}

impl KeepCount {
    /// Takes one; `false`: none is left.
    fn take(&mut self) -> bool {
        match self {
            KeepCount::None | KeepCount::Last(0) => return false,
            KeepCount::Last(left) => *left -= 1,
            KeepCount::Unlimited => {}
        }
        true
    }
}

impl FromStr for KeepCount {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<KeepCount, &'static str> {
        match (text, text.parse()) {
            ("unlimited", _) => Ok(KeepCount::Unlimited),
            (_, Ok(count)) if count > 0 => Ok(KeepCount::Last(count)),
            _ => Err("write a number from 1, or unlimited"),
        }
    }
}

/// A duration in units of the calendar, as `1y6m`, `2w` or `7d12h`; `m` is a month.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeepDuration {
    years: i64,
    months: i64,
    days: i64,
    hours: i64,
}

impl KeepDuration {
    /// Largest number of a unit, so that times stay in the calendar.
    const MOST: i64 = 5000;

    /// The time this long before `time`; `None`: it is not in the calendar.
    fn before(self, time: &Zoned) -> Option<Zoned> {
        let KeepDuration { years, months, days, hours } = self;
        let span = Span::new().try_years(years).and_then(|span| span.try_months(months));
        let span = span.and_then(|span| span.try_days(days)?.try_hours(hours));
        time.checked_sub(span.ok()?).ok()
    }
}

impl FromStr for KeepDuration {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<KeepDuration, &'static str> {
        const WRONG: &str = "write a duration such as 7d, 2w, 6m or 1y6m (y years, m months, w weeks, d days, h hours)";
        let mut all = KeepDuration::default();
        let mut rest = text;
        while !rest.is_empty() {
            let end = rest.find(|c: char| !c.is_ascii_digit()).ok_or(WRONG)?;
            let count = rest[..end].parse::<i64>().ok().filter(|count| *count <= Self::MOST);
            let count = count.ok_or(WRONG)?;
            let (unit, factor) = match rest.as_bytes()[end] {
                b'y' => (&mut all.years, 1),
                b'm' => (&mut all.months, 1),
                b'w' => (&mut all.days, 7),
                b'd' => (&mut all.days, 1),
                b'h' => (&mut all.hours, 1),
                _ => return Err(WRONG),
            };
            *unit += count * factor;
            rest = &rest[end + 1..];
        }
        if all == KeepDuration::default() { Err(WRONG) } else { Ok(all) }
    }
}

impl fmt::Display for KeepDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KeepDuration { years, months, days, hours } = *self;
        let units = [(years, "y"), (months, "m"), (days, "d"), (hours, "h")];
        units
            .iter()
            .filter(|unit| unit.0 > 0)
            .try_for_each(|(count, name)| write!(f, "{count}{name}"))
    }
}

/// A policy: what one of its rules keeps is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RetentionPolicy {
    /// The last times.
    pub last: KeepCount,
    /// The newest time of each day.
    pub daily: KeepCount,
    /// The newest time of each week.
    pub weekly: KeepCount,
    /// The newest time of each month.
    pub monthly: KeepCount,
    /// The newest time of each year.
    pub yearly: KeepCount,
    /// All times within this duration of the newest time.
    pub within: Option<KeepDuration>,
}

/// The decision about one time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RetentionDecision {
    /// The rules that keep the time; empty: it is removed.
    pub reasons: Vec<String>,
}

impl RetentionDecision {
    /// Whether the time is kept.
    pub fn is_kept(&self) -> bool {
        !self.reasons.is_empty()
    }
}

/// A rule that keeps one time of each period.
struct PeriodRule {
    name: &'static str,
    left: KeepCount,
    /// The period of a time, as text.
    period: fn(&Zoned) -> String,
    /// The period of the last time that was kept.
    last: Option<String>,
}

impl PeriodRule {
    /// Why the rule keeps a time, which comes after all newer ones; `None`: it does not.
    fn decide(&mut self, time: &Zoned, is_oldest: bool) -> Option<String> {
        let period = (self.period)(time);
        let is_new = self.last.as_ref() != Some(&period);
        if !(is_new || is_oldest) || !self.left.take() {
            return None;
        }
        let reason = if is_new {
            format!("{} {period}", self.name)
        } else {
            format!("oldest, {}", self.name)
        };
        self.last = Some(period);
        Some(reason)
    }
}

impl RetentionPolicy {
    /// Whether no rule is in use.
    pub fn is_empty(&self) -> bool {
        *self == RetentionPolicy::default()
    }

    fn rules(&self) -> [PeriodRule; 4] {
        let rule = |name, left, period| PeriodRule { name, left, period, last: None };
        [
            rule("daily", self.daily, |time| time.strftime("%Y-%m-%d").to_string()),
            rule("weekly", self.weekly, |time| time.strftime("%G-W%V").to_string()),
            rule("monthly", self.monthly, |time| time.strftime("%Y-%m").to_string()),
            rule("yearly", self.yearly, |time| time.strftime("%Y").to_string()),
        ]
    }

    /// Decides about each time, in the order of `times`. Of equal times the later one in `times` is the newer one.
    pub fn decide(&self, times: &[Zoned]) -> Vec<RetentionDecision> {
        let mut decisions = vec![RetentionDecision::default(); times.len()];
        let mut order: Vec<usize> = (0..times.len()).collect();
        order.sort_by_key(|&index| (times[index].timestamp(), index));
        order.reverse();
        let (Some(&newest), Some(&oldest)) = (order.first(), order.last()) else {
            return decisions;
        };
        let since = self.within.map(|within| (within, within.before(&times[newest])));
        let mut rules = self.rules();
        let mut last = self.last;
        for (place, &index) in order.iter().enumerate() {
            let time = &times[index];
            let reasons = &mut decisions[index].reasons;
            if last.take() {
                reasons.push(format!("last {}", place + 1));
            }
            let decided = rules.iter_mut().filter_map(|rule| rule.decide(time, index == oldest));
            reasons.extend(decided);
            if let Some((within, since)) = &since
                && since.as_ref().is_none_or(|since| time > since)
            {
                reasons.push(format!("within {within} of the newest"));
            }
        }
        decisions
    }
}

#[cfg(test)]
mod tests {
    use jiff::ToSpan as _;
    use proptest::prelude::*;

    use super::*;

    fn times(texts: &[&str]) -> Vec<Zoned> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    /// The indices that are kept.
    fn kept(policy: RetentionPolicy, times: &[Zoned]) -> Vec<usize> {
        let decisions = policy.decide(times);
        (0..times.len()).filter(|&index| decisions[index].is_kept()).collect()
    }

    fn last(count: u32) -> RetentionPolicy {
        RetentionPolicy { last: KeepCount::Last(count), ..RetentionPolicy::default() }
    }

    #[test]
    fn of_each_period_the_newest_is_kept_and_the_oldest_of_all_while_a_rule_has_room() {
        let times = times(&[
            "2025-12-29T01:00[UTC]", // Monday of the first week of 2026
            "2025-12-31T01:00[UTC]",
            "2026-01-02T01:00[UTC]",
            "2026-01-02T23:00[UTC]",
            "2026-02-01T01:00[UTC]",
            "2026-02-02T01:00[UTC]",
        ]);
        let with = |set: fn(&mut RetentionPolicy, KeepCount), count| {
            let mut policy = RetentionPolicy::default();
            set(&mut policy, KeepCount::Last(count));
            kept(policy, &times)
        };
        assert_eq!(kept(last(2), &times), [4, 5]);
        assert_eq!(with(|policy, count| policy.daily = count, 3), [3, 4, 5]);
        assert_eq!(with(|policy, count| policy.weekly = count, 2), [4, 5]);
        assert_eq!(with(|policy, count| policy.weekly = count, 3), [3, 4, 5]);
        assert_eq!(with(|policy, count| policy.monthly = count, 2), [3, 5]);
        assert_eq!(with(|policy, count| policy.yearly = count, 2), [1, 5]);
        // Room for three, but two years: the oldest, too.
        assert_eq!(with(|policy, count| policy.yearly = count, 3), [0, 1, 5]);
        let decided = RetentionPolicy { yearly: KeepCount::Last(3), ..last(1) }.decide(&times);
        assert_eq!(decided[0].reasons, ["oldest, yearly"]);
        assert_eq!(decided[5].reasons, ["last 1", "yearly 2026"]);
        let within = Some("1m".parse().unwrap());
        assert_eq!(kept(RetentionPolicy { within, ..last(1) }, &times), [3, 4, 5]);
        let unlimited = RetentionPolicy { daily: KeepCount::Unlimited, ..last(1) };
        assert_eq!(kept(unlimited, &times), [0, 1, 3, 4, 5]);
        assert!(kept(last(1), &[]).is_empty());
    }

    #[test]
    fn days_are_those_of_the_zone_also_when_clocks_change() {
        // 2026-10-25 has 25 hours in Berlin: both are of that day, and two days apart in UTC.
        let autumn = times(&["2026-10-25T00:30[Europe/Berlin]", "2026-10-25T23:30[Europe/Berlin]"]);
        let daily = RetentionPolicy { daily: KeepCount::Last(1), ..RetentionPolicy::default() };
        assert_eq!(kept(daily, &autumn), [1]);
        // The hour that exists twice: the later one is newer, though its clock shows less.
        let twice = times(&[
            "2026-10-25T02:50+02:00[Europe/Berlin]",
            "2026-10-25T02:10+01:00[Europe/Berlin]",
        ]);
        assert_eq!(kept(daily, &twice), [1]);
        // A day before 03:30 of the day after the change in spring is 03:30, 23 hours earlier.
        let spring = times(&[
            "2026-03-29T03:20[Europe/Berlin]",
            "2026-03-29T03:40[Europe/Berlin]",
            "2026-03-30T03:30[Europe/Berlin]",
        ]);
        let within =
            RetentionPolicy { within: Some("1d".parse().unwrap()), ..RetentionPolicy::default() };
        assert_eq!(kept(within, &spring), [1, 2]);
    }

    #[test]
    fn counts_and_durations_are_read() {
        for (text, shown) in [("7d", "7d"), ("1y6m", "1y6m"), ("2w1d3h", "15d3h"), ("1h", "1h")] {
            assert_eq!(text.parse::<KeepDuration>().unwrap().to_string(), shown);
        }
        for wrong in
            ["", "7", "d", "7s", "-1d", "0d", "1d ", "5001y", "99999999999999999999d", "1\u{e4}"]
        {
            assert!(wrong.parse::<KeepDuration>().is_err(), "{wrong}");
        }
        assert_eq!("3".parse(), Ok(KeepCount::Last(3)));
        assert_eq!("unlimited".parse(), Ok(KeepCount::Unlimited));
        for wrong in ["0", "-1", "x", "", "4294967296"] {
            assert!(wrong.parse::<KeepCount>().is_err(), "{wrong}");
        }
        let far = "5000y".parse::<KeepDuration>().unwrap();
        let all = RetentionPolicy { within: Some(far), ..RetentionPolicy::default() };
        assert_eq!(
            kept(all, &times(&["2026-01-01T00:00[UTC]"])),
            [0],
            "before the calendar begins"
        );
    }

    fn counts() -> impl Strategy<Value = KeepCount> {
        prop_oneof![
            Just(KeepCount::None),
            (1_u32..6).prop_map(KeepCount::Last),
            Just(KeepCount::Unlimited)
        ]
    }

    /// Hours from 2024 to 2028, in a zone whose clocks change.
    fn any_times() -> impl Strategy<Value = Vec<Zoned>> {
        let start: Zoned = "2024-01-01T00:00[America/New_York]".parse().unwrap();
        proptest::collection::vec(0_i64..35_000, 0..60).prop_map(move |hours| {
            hours.into_iter().map(|hour| start.checked_add(hour.hours()).unwrap()).collect()
        })
    }

    proptest! {
        #[test]
        fn a_policy_keeps_what_its_rules_keep_and_is_stable(
            times in any_times(),
            [last, daily, weekly, monthly, yearly] in proptest::array::uniform5(counts()),
        ) {
            let policy = RetentionPolicy { last, daily, weekly, monthly, yearly, within: None };
            let found = kept(policy, &times);
            // Each rule alone keeps a part of it.
            let mut together: Vec<usize> = Vec::new();
            for alone in [
                RetentionPolicy { last, ..RetentionPolicy::default() },
                RetentionPolicy { daily, ..RetentionPolicy::default() },
                RetentionPolicy { weekly, ..RetentionPolicy::default() },
                RetentionPolicy { monthly, ..RetentionPolicy::default() },
                RetentionPolicy { yearly, ..RetentionPolicy::default() },
            ] {
                together.extend(kept(alone, &times));
            }
            together.sort_unstable();
            together.dedup();
            prop_assert_eq!(&found, &together);
            // The newest is kept by every policy.
            let newest = (0..times.len()).max_by_key(|&index| (times[index].timestamp(), index));
            if !policy.is_empty() {
                prop_assert!(newest.is_none_or(|newest| found.contains(&newest)));
            }
            // What is left is kept when it is decided again.
            let left: Vec<Zoned> = found.iter().map(|&index| times[index].clone()).collect();
            prop_assert_eq!(kept(policy, &left).len(), left.len());
            // The order in which times are listed does not matter.
            let back: Vec<Zoned> = times.iter().rev().cloned().collect();
            let again = kept(policy, &back);
            let stamps = |indices: &[usize], times: &[Zoned]| {
                let mut all: Vec<_> = indices.iter().map(|&index| times[index].timestamp()).collect();
                all.sort();
                all
            };
            prop_assert_eq!(stamps(&found, &times), stamps(&again, &back));
        }

        #[test]
        fn a_count_of_days_keeps_that_many_days(times in any_times(), count in 1_u32..9) {
            let policy = RetentionPolicy { daily: KeepCount::Last(count), ..RetentionPolicy::default() };
            let days = |indices: &[usize]| {
                let mut days: Vec<_> = indices.iter().map(|&index| times[index].date()).collect();
                days.sort();
                days.dedup();
                days
            };
            let all = days(&(0..times.len()).collect::<Vec<_>>());
            let found = days(&kept(policy, &times));
            prop_assert_eq!(found.len(), all.len().min(count as usize));
            prop_assert_eq!(&found[..], &all[all.len() - found.len()..]);
        }
    }
}
