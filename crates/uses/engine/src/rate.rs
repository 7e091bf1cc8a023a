//! A limit on bytes and requests per second for all lanes of a copy together; it may change while
//! the copy runs.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::parse_rate;
use blockhaul_io::TokenBucket;

/// What may be used up at once after a pause: a tenth of a second's worth, as QEMU's slices.
const BURSTS_PER_SECOND: u64 = 10;
/// A change of the limit and a cancel are noticed after this.
const STEP: Duration = Duration::from_millis(100);

/// Limits on bytes and requests per second; 0 is none. Shared by all copies that are limited together.
#[derive(Debug)]
pub struct RateLimit {
    /// Avoids the lock if there is no limit.
    limited: AtomicBool,
    buckets: Mutex<[TokenBucket; 2]>,
}

impl RateLimit {
    /// A limit of `bytes` and `requests` per second.
    pub fn new(bytes: u64, requests: u64) -> RateLimit {
        let buckets = [bytes, requests].map(|rate| {
            let mut bucket = TokenBucket::new(rate, rate / BURSTS_PER_SECOND);
            bucket.empty();
            bucket
        });
        let limited = AtomicBool::new(buckets.iter().any(|bucket| bucket.rate() > 0));
        RateLimit { limited, buckets: Mutex::new(buckets) }
    }

    /// From now on so many bytes and requests per second, also for requests that wait. What was used beyond
    /// another rate is not waited for.
    pub fn set(&self, bytes: u64, requests: u64) {
        let mut buckets = self.buckets.lock().expect("no panic under this lock");
        let now = blockhaul_io::now();
        for (bucket, rate) in buckets.iter_mut().zip([bytes, requests]) {
            if bucket.rate() != rate {
                bucket.set(rate, rate / BURSTS_PER_SECOND, now);
                bucket.empty();
            }
        }
        let limited = buckets.iter().any(|bucket| bucket.rate() > 0);
        self.limited.store(limited, Ordering::Relaxed);
    }

    /// The limits: bytes and requests per second.
    pub fn limits(&self) -> (u64, u64) {
        let buckets = self.buckets.lock().expect("no panic under this lock");
        (buckets[0].rate(), buckets[1].rate())
    }

    /// Whether there is a limit.
    pub(crate) fn is_limited(&self) -> bool {
        self.limited.load(Ordering::Relaxed)
    }

    /// Waits until a request of `bytes` bytes may start, or `stopped`.
    pub(crate) async fn take(&self, bytes: u64, stopped: impl Fn() -> bool) {
        while self.is_limited() && !stopped() {
            match self.try_take(bytes, blockhaul_io::now()) {
                None => return,
                Some(wait) => blockhaul_io::sleep(wait.min(STEP)).await,
            }
        }
    }

    /// Waits until a request may start, without drawing its tokens, or `stopped`.
    pub(crate) async fn paid(&self, stopped: impl Fn() -> bool) {
        while self.is_limited() && !stopped() {
            match self.debt(blockhaul_io::now()) {
                None => return,
                Some(wait) => blockhaul_io::sleep(wait.min(STEP)).await,
            }
        }
    }

    /// How long until the tokens of earlier requests have come in.
    fn debt(&self, now: Instant) -> Option<Duration> {
        longest_wait(&mut self.buckets.lock().expect("no panic under this lock")[..], now)
    }

    /// Draws the tokens of a request, which may be more than are there; or how long to wait until those of
    /// earlier requests have come in.
    fn try_take(&self, bytes: u64, now: Instant) -> Option<Duration> {
        let mut buckets = self.buckets.lock().expect("no panic under this lock");
        if let Some(wait) = longest_wait(&mut buckets[..], now) {
            return Some(wait);
        }
        for (bucket, tokens) in buckets.iter_mut().zip([bytes, 1]) {
            if bucket.rate() > 0 {
                bucket.draw(tokens, now);
            }
        }
        None
    }
}

/// How long until all tokens that were drawn have come in.
fn longest_wait(buckets: &mut [TokenBucket], now: Instant) -> Option<Duration> {
    let limited = buckets.iter_mut().filter(|bucket| bucket.rate() > 0);
    limited.filter_map(|bucket| bucket.wait_for_all(now)).max()
}

/// Rates by day and time of day: `mon-fri 08:00-18:00=50M,*=0`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RateSchedule {
    rules: Vec<Rule>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rule {
    /// First and last day, from 0 (Monday) to 6; `None`: every day.
    days: Option<(u8, u8)>,
    /// First minute of the day, and the one after the last; `None`: always.
    span: Option<(u16, u16)>,
    rate: u64,
}

impl RateSchedule {
    /// Parses a rate, or rules separated by commas, of which the first that matches the time
    /// applies: `FROM-TO=RATE` with times as HH:MM (the span may cross midnight), or `*=RATE`. A day or
    /// days may stand before the span or in its place: `mon-fri 08:00-18:00=50M`, `sun=0`; a span that crosses
    /// midnight belongs to the day on which it begins. 0 is no limit, and so is a time without a rule.
    ///
    /// # Errors
    /// [`Kind::Usage`] with the invalid part.
    pub fn parse(text: &str) -> Result<RateSchedule> {
        let wrong = |part: &str, why: &str| {
            let text = format!(
                "{part:?}: {why}; rates by time look like 08:00-18:00=50M,*=0 or mon-fri 08:00-18:00=50M"
            );
            Error::new(Kind::Usage, text)
        };
        let rate = |part: &str, text: &str| match text {
            "0" => Ok(0),
            _ => parse_rate(text).map_err(|error| wrong(part, &error.text())),
        };
        if !text.contains('=') {
            let rule = Rule { days: None, span: None, rate: rate(text, text)? };
            return Ok(RateSchedule { rules: vec![rule] });
        }
        let mut rules = Vec::new();
        for part in text.split(',') {
            let (span, value) = part.split_once('=').ok_or_else(|| wrong(part, "without ="))?;
            let (days, span) = split_days(span.trim());
            if span.starts_with(char::is_alphabetic) {
                let why = "days are mon, tue, wed, thu, fri, sat and sun, or a range like mon-fri";
                return Err(wrong(part, why));
            }
            let span = match span {
                "*" => None,
                "" if days.is_some() => None,
                span => {
                    let (from, to) =
                        span.split_once('-').ok_or_else(|| wrong(part, "not * or a time span"))?;
                    let times = (minute(from), minute(to));
                    let (Some(from), Some(to)) = times else {
                        return Err(wrong(part, "times are HH:MM, up to 24:00"));
                    };
                    if from == to {
                        return Err(wrong(part, "the span is empty"));
                    }
                    Some((from, to))
                }
            };
            rules.push(Rule { days, span, rate: rate(part, value.trim())? });
        }
        Ok(RateSchedule { rules })
    }

    /// The rate on this day, from 0 (Monday) to 6, at this minute of the day, from 0 to 1439; 0: no limit.
    pub fn rate_at(&self, day: u8, minute: u16) -> u64 {
        let is_for = |rule: &&Rule| match rule.span {
            None => rule.is_on(day),
            Some((from, to)) if from < to => rule.is_on(day) && (from..to).contains(&minute),
            Some((from, _)) if minute >= from => rule.is_on(day),
            Some((_, to)) => minute < to && rule.is_on((day + 6) % 7),
        };
        self.rules.iter().find(is_for).map_or(0, |rule| rule.rate)
    }

    /// Whether the rate depends on the time.
    pub fn changes(&self) -> bool {
        self.rules.iter().any(|rule| rule.span.is_some() || rule.days.is_some())
    }
}

impl Rule {
    /// Whether it is one for this day.
    fn is_on(&self, day: u8) -> bool {
        self.days.is_none_or(|(first, last)| {
            if first <= last { (first..=last).contains(&day) } else { day >= first || day <= last }
        })
    }
}

/// The days before a span, first and last, if there are any, and the span.
fn split_days(text: &str) -> (Option<(u8, u8)>, &str) {
    let (days, span) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let (first, last) = days.split_once('-').unwrap_or((days, days));
    match day(first).zip(day(last)) {
        Some(days) => (Some(days), span.trim()),
        None => (None, text),
    }
}

/// A day by the first three letters of its English name, from 0 (Monday) to 6.
fn day(name: &str) -> Option<u8> {
    const DAYS: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
    let place = DAYS.iter().position(|day| day.eq_ignore_ascii_case(name))?;
    u8::try_from(place).ok()
}

/// Minute of the day of `HH:MM`.
fn minute(text: &str) -> Option<u16> {
    let (hours, minutes) = text.trim().split_once(':')?;
    let number = |text: &str| {
        if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse::<u16>().ok() } else { None }
    };
    let hours = number(hours)?;
    let minutes = number(minutes)?;
    let total = hours.checked_mul(60)?.checked_add(minutes)?;
    (minutes < 60 && total <= 24 * 60).then_some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seconds that so many requests of this size take at these limits.
    fn time(rate: &RateLimit, requests: u32, bytes: u64) -> f64 {
        let start = Instant::now();
        let mut now = start;
        for _ in 0..requests {
            while let Some(wait) = rate.try_take(bytes, now) {
                now += wait;
            }
        }
        (now - start).as_secs_f64()
    }

    #[test]
    fn bytes_and_requests_are_both_limited() {
        let seconds = time(&RateLimit::new(1_000_000, 0), 1000, 10_000);
        assert!((9.8..10.1).contains(&seconds), "{seconds}");
        let seconds = time(&RateLimit::new(0, 100), 1000, 10_000);
        assert!((9.8..10.1).contains(&seconds), "{seconds}");
        let seconds = time(&RateLimit::new(1_000_000, 50), 1000, 10_000);
        assert!((19.8..20.1).contains(&seconds), "the tighter one counts: {seconds}");
        assert_eq!(time(&RateLimit::new(0, 0), 1000, u64::MAX), 0.0);
        // Requests larger than a second's worth pass, and are paid afterwards.
        let seconds = time(&RateLimit::new(1000, 0), 3, 5000);
        assert!((9.8..10.1).contains(&seconds), "{seconds}");
    }

    #[test]
    fn a_change_counts_at_once() {
        let rate = RateLimit::new(1, 0);
        let start = Instant::now();
        assert_eq!(rate.try_take(1 << 40, start), None);
        assert!(rate.try_take(1, start).is_some(), "in debt for a long time");
        rate.set(1 << 20, 0);
        assert_eq!(rate.try_take(1, Instant::now()), None);
        rate.set(0, 0);
        assert_eq!(rate.limits(), (0, 0));
        assert!(!rate.limited.load(Ordering::Relaxed));
    }

    #[test]
    fn schedules_are_read_by_the_first_rule_that_fits() {
        let day = RateSchedule::parse("08:00-18:00=50M,*=0").unwrap();
        assert!(day.changes());
        let rates = [0, 479, 480, 1079, 1080, 1439].map(|minute| day.rate_at(3, minute));
        assert_eq!(rates, [0, 0, 50 << 20, 50 << 20, 0, 0]);
        let night = RateSchedule::parse("22:00-06:30=0, 12:00-13:00=1G ,*=10M").unwrap();
        let rates = [0, 389, 390, 720, 1319, 1320].map(|minute| night.rate_at(3, minute));
        assert_eq!(rates, [0, 0, 10 << 20, 1 << 30, 10 << 20, 0]);
        let plain = RateSchedule::parse("100M").unwrap();
        assert!(!plain.changes());
        assert_eq!(plain.rate_at(0, 77), 100 << 20);
        assert_eq!(RateSchedule::parse("0").unwrap().rate_at(0, 0), 0);
        assert_eq!(RateSchedule::parse("18:00-24:00=1M").unwrap().rate_at(6, 1439), 1 << 20);
        for wrong in [
            "",
            "x",
            "=",
            "*",
            "*=",
            "8-18=1M",
            "08:00-18:00",
            "08:60-18:00=1M",
            "25:00-26:00=1M",
            "08:00-08:00=1M",
            "08:00-18:00=1M,",
            "+8:00-9:00=1M",
            "*=1Q",
            "mon-x 08:00-18:00=1M",
            "mon 8=1M",
            "mon- 08:00-18:00=1M",
            "monday=1M",
            " =1M",
        ] {
            assert!(RateSchedule::parse(wrong).is_err(), "{wrong:?}");
        }
        for days in ["mon-x 08:00-18:00=1M", "monday=1M"] {
            let error = RateSchedule::parse(days).unwrap_err();
            assert!(error.text().contains("days are mon, tue"), "{error}");
        }
    }

    #[test]
    fn rules_have_days() {
        let text = "mon-fri 08:00-18:00=50M, fri 22:00-06:00=1M,sat-mon=2M,*=3M";
        let week = RateSchedule::parse(text).unwrap();
        let rates = |minute| [0, 3, 4, 5, 6].map(|day| week.rate_at(day, minute) >> 20);
        assert_eq!(rates(600), [50, 50, 50, 2, 2]);
        assert_eq!(rates(1330), [2, 3, 1, 2, 2]);
        assert_eq!(rates(60), [2, 3, 3, 1, 2], "the night of Friday is that to Saturday");
        assert!(week.changes() && RateSchedule::parse("Sun=1M").unwrap().changes());
    }
}
