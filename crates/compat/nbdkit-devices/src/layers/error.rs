//! `error`: lets chosen requests fail before they reach the device. For testing callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhaul_block::{Device, Error, Facts, Kind, OpKind, PendingRequest, Request, Result};
use blockhaul_catalog::{Layer, LayerKind, Param, ParamKind, ParamValues, parse_size};

/// Names of error numbers and their kinds.
const ERRORS: [(&str, Kind); 6] = [
    ("EIO", Kind::Io),
    ("ENOSPC", Kind::NoSpace),
    ("EPERM", Kind::ReadOnly),
    ("EINVAL", Kind::Invalid),
    ("ENOMEM", Kind::NoMemory),
    ("ESHUTDOWN", Kind::ShuttingDown),
];

/// The layer `error`.
pub static ERROR: LayerKind = LayerKind {
    name: "error",
    summary: "makes requests fail, all or by share, range and number",
    manual: "For tests of clients. Requests fail before they reach the device: all of them, a share of all \
or of one kind, or those that touch a range; `after` requests pass first, and at most `count` \
fail. Which requests fail depends only on `seed`.",
    example: r#"
blockhaul serve --layer 'error?read=20%&count=5' sample:64M \
  --run 'blockhaul copy "$uri" null:'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[
        Param {
            name: "error",
            kind: ParamKind::Choice(&["EIO", "ENOSPC", "EPERM", "EINVAL", "ENOMEM", "ESHUTDOWN"]),
            default: Some("EIO"),
            doc: "Error of the failing requests.",
        },
        share("all", "Share of all requests that fail [default: 100% if no share is given]."),
        share("read", "Share of reads that fail."),
        share("write", "Share of writes that fail."),
        share("zero", "Share of zero requests that fail."),
        share("trim", "Share of trim requests that fail."),
        share("flush", "Share of flushes that fail."),
        share("cache", "Share of cache hints that fail."),
        share("extents", "Share of requests for extents that fail."),
        Param {
            name: "at",
            kind: ParamKind::Text,
            default: None,
            doc: "Only requests that touch this range fail: OFFSET or OFFSET,LENGTH.",
        },
        number("after", Some("0"), "Number of matching requests that pass first."),
        number("count", None, "Number of requests that fail at most; then all pass."),
        number(
            "seed",
            Some("1"),
            "Seed that selects the requests that fail if the share is not 100%.",
        ),
    ],
    changeable: &[],
    configure: |args| configure(args),
};

/// The share of requests of one kind that fail.
const fn share(name: &'static str, doc: &'static str) -> Param {
    Param { name, kind: ParamKind::Share, default: None, doc }
}

/// An optional number.
const fn number(name: &'static str, default: Option<&'static str>, doc: &'static str) -> Param {
    Param { name, kind: ParamKind::Number, default, doc }
}

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let name = args.text("error").unwrap_or("EIO");
    let kind = ERRORS.iter().find(|row| row.0 == name).map_or(Kind::Io, |row| row.1);
    let single = OpKind::ALL.map(|kind| args.share(kind.name()));
    let rest = match args.share("all") {
        Some(share) => share,
        None if single.iter().all(Option::is_none) => 1.0,
        None => 0.0,
    };
    let plan = ErrorInjection {
        name: name.to_string(),
        kind,
        shares: single.map(|share| share.unwrap_or(rest)),
        range: args.text("at").map(parse_range).transpose()?,
        after: args.number("after").unwrap_or(0),
        count: args.number("count").unwrap_or(u64::MAX),
        seed: args.number("seed").unwrap_or(1),
        asked: AtomicU64::new(0),
        failed: AtomicU64::new(0),
    };
    Ok(Arc::new(ErrorLayer { plan: Arc::new(plan) }))
}

fn parse_range(text: &str) -> Result<(u64, u64)> {
    let wrong = |error: Error| Error::new(Kind::Usage, format!("error: at: {}", error.text()));
    let (at, len) = text.split_once(',').unwrap_or((text, "1"));
    let at = parse_size(at).map_err(wrong)?;
    let len = parse_size(len).map_err(wrong)?;
    // Sizes are below 2^63: the sum fits.
    Ok((at, at + len))
}

struct ErrorLayer {
    plan: Arc<ErrorInjection>,
}

impl Layer for ErrorLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(ErrorDevice { inner, plan: self.plan.clone() }))
    }
}

struct ErrorInjection {
    name: String,
    kind: Kind,
    /// In the order of [`OpKind::ALL`].
    shares: [f64; 7],
    /// Start and end.
    range: Option<(u64, u64)>,
    after: u64,
    count: u64,
    seed: u64,
    /// Number of eligible requests so far.
    asked: AtomicU64,
    /// Number of failed requests so far.
    failed: AtomicU64,
}

impl ErrorInjection {
    fn fails(&self, request: &Request) -> bool {
        let share = self.shares[request.kind() as usize];
        let touches = self.range.is_none_or(|(start, end)| {
            request.at < end && request.end().is_none_or(|request_end| request_end > start)
        });
        if share <= 0.0 || !touches {
            return false;
        }
        let number = self.asked.fetch_add(1, Ordering::Relaxed);
        if number < self.after || unit(self.seed, number) >= share {
            return false;
        }
        let left = |failed| (failed < self.count).then_some(failed + 1);
        self.failed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).is_ok()
    }
}

/// A number from 0 to below 1 that depends only on its arguments (SplitMix64).
fn unit(seed: u64, number: u64) -> f64 {
    let mut mixed = seed.wrapping_add(number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    // A float holds 53 bits exactly.
    ((mixed ^ mixed >> 31) >> 11) as f64 / (1_u64 << 53) as f64
}

struct ErrorDevice {
    inner: Arc<dyn Device>,
    plan: Arc<ErrorInjection>,
}

impl Device for ErrorDevice {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if self.plan.fails(&request) {
            let text = format!("{} from the error layer", self.plan.name);
            return Error::new(self.plan.kind, text).into();
        }
        self.inner.submit(request)
    }
}
