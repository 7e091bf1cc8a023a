//! The options of the cache.

use std::path::PathBuf;

use blockhaul_block::Result;
use blockhaul_catalog::{ParamValues, parse_switch};

use crate::declared::usage;

/// When writes reach the device below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CacheMode {
    Writeback,
    Writethrough,
    Unsafe,
}

/// Whether read data is cached.
#[derive(Clone)]
pub(super) enum OnRead {
    Always,
    Never,
    While(PathBuf),
}

impl OnRead {
    fn parse(text: &str) -> Result<OnRead> {
        Ok(match parse_switch(text) {
            Ok(true) => OnRead::Always,
            Ok(false) => OnRead::Never,
            Err(_) if text.starts_with('/') => OnRead::While(text.into()),
            Err(_) => {
                let text =
                    format!("cache: cache-on-read={text} is not true, false or an absolute path");
                return Err(usage(text));
            }
        })
    }

    /// Whether it is cached now.
    pub(super) fn now(&self) -> bool {
        match self {
            OnRead::Always => true,
            OnRead::Never => false,
            OnRead::While(path) => path.exists(),
        }
    }
}

/// The parsed options.
pub(super) struct CacheOptions {
    pub(super) mode: CacheMode,
    pub(super) on_read: OnRead,
    pub(super) block: u64,
    /// Maximum bytes, and the sizes at which eviction begins and ends.
    pub(super) bound: Option<(u64, u64, u64)>,
    pub(super) dir: Option<String>,
}

impl CacheOptions {
    pub(super) fn new(args: &ParamValues) -> Result<CacheOptions> {
        let mode = match args.text("cache") {
            Some("writethrough") => CacheMode::Writethrough,
            Some("unsafe") => CacheMode::Unsafe,
            _ => CacheMode::Writeback,
        };
        let block = args.size("cache-min-block-size").unwrap_or(64 << 10);
        if !block.is_power_of_two() || !(4096..=16 << 20).contains(&block) {
            return Err(usage("cache: cache-min-block-size must be a power of two from 4k to 16M"));
        }
        let high = args.number("cache-high-threshold");
        let low = args.number("cache-low-threshold");
        let high = high.unwrap_or(95);
        let low = low.unwrap_or(80);
        if low == 0 || low >= high || high > 100 {
            return Err(usage(
                "cache: cache-low-threshold must be above 0 and below cache-high-threshold, which is \
                 at most 100",
            ));
        }
        let bound = args.size("cache-max-size").map(|most| {
            let percent = |share: u64| (u128::from(most) * u128::from(share) / 100) as u64;
            (most, percent(high), percent(low))
        });
        let on_read = OnRead::parse(args.text("cache-on-read").unwrap_or("false"))?;
        Ok(CacheOptions { mode, on_read, block, bound, dir: args.text("dir").map(String::from) })
    }
}

/// The same in blocks.
pub(super) struct Bound {
    pub(super) most: u64,
    pub(super) high: u64,
    pub(super) low: u64,
}

/// The cache's limit in blocks.
pub(super) fn bound_in_blocks(bound: (u64, u64, u64), block: u64) -> Result<Bound> {
    let most = bound.0 / block;
    let high = bound.1 / block;
    let low = bound.2 / block;
    if most == 0 {
        return Err(usage(format!("cache: cache-max-size is less than a block of {block} bytes")));
    }
    Ok(Bound { most, high, low: low.min(high) })
}
