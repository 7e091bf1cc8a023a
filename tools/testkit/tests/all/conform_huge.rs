//! Devices far larger than memory, and devices that discard writes, pass the suite too.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use blockhaul_block::{
    Device, Extents, Facts, HOLE, Op, Outcome, PendingRequest, Reply, Request, RequestFlags, ZERO,
};
use blockhaul_io::Data;
use blockhaul_testkit::conform::{self, ConformOptions, InitialContent};
use blockhaul_testkit::model::Model;

const PAGE: u64 = 4096;

/// Written pages; everything else is a hole. Or nothing at all.
struct Sparse {
    facts: Arc<Facts>,
    pages: Mutex<BTreeMap<u64, Vec<u8>>>,
    keeps: bool,
}

fn sparse(size: u64, keeps: bool) -> Arc<dyn Device> {
    let mut facts = Model::all_facts(0);
    facts.size = size;
    Arc::new(Sparse { facts: Arc::new(facts), pages: Mutex::default(), keeps })
}

impl Sparse {
    /// Calls `f` for each page of a range: its number, and the part of it.
    fn each(at: u64, len: u64, mut f: impl FnMut(u64, std::ops::Range<usize>)) {
        let mut here = at;
        while here < at + len {
            let end = (at + len).min(here - here % PAGE + PAGE);
            let from = (here % PAGE) as usize;
            f(here / PAGE, from..from + (end - here) as usize);
            here = end;
        }
    }

    fn apply(&self, request: Request) -> Outcome {
        let Request { op, at, len, flags } = request;
        let mut pages = self.pages.lock().unwrap();
        match op {
            Op::Read(room) => {
                let mut buf = room.into_buf();
                buf.fill(0);
                let mut done = 0;
                Sparse::each(at, len, |page, part| {
                    let count = part.len();
                    if let Some(bytes) = pages.get(&page) {
                        buf[done..done + count].copy_from_slice(&bytes[part]);
                    }
                    done += count;
                });
                return Ok(Reply::Data(Data::from(buf)));
            }
            Op::Write(data) if self.keeps => {
                let mut done = 0;
                Sparse::each(at, len, |page, part| {
                    let bytes = pages.entry(page).or_insert_with(|| vec![0; PAGE as usize]);
                    bytes[part.clone()].copy_from_slice(&data.bytes()[done..done + part.len()]);
                    done += part.len();
                });
            }
            Op::Zero if self.keeps => {
                if flags.contains(RequestFlags::NO_HOLE) {
                    Sparse::each(at, len, |page, _| {
                        pages.entry(page).or_insert_with(|| vec![0; PAGE as usize]);
                    });
                }
                let first = at / PAGE;
                let last = (at + len - 1) / PAGE;
                for (page, bytes) in pages.range_mut(first..=last) {
                    let from = at.saturating_sub(page * PAGE).min(PAGE) as usize;
                    let to = (at + len - page * PAGE).min(PAGE) as usize;
                    bytes[from..to].fill(0);
                }
            }
            Op::Extents(contexts) => {
                let mut list = Extents::new();
                let mut here = at;
                while here < at + len && list.len() < 100 {
                    let page = here / PAGE;
                    let (state, end) = if pages.contains_key(&page) {
                        (0, (page + 1) * PAGE)
                    } else {
                        let next = pages.range(page..).next();
                        (HOLE | ZERO, next.map_or(u64::MAX, |(page, _)| page * PAGE))
                    };
                    let end = end.min(at + len);
                    list.push(end - here, state);
                    here = end;
                }
                if flags.contains(RequestFlags::ONE_EXTENT) {
                    list.first_only();
                }
                return Ok(Reply::Extents(contexts.iter().map(|_| list.clone()).collect()));
            }
            _ => {}
        }
        Ok(Reply::Done)
    }
}

impl Device for Sparse {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        self.apply(request).into()
    }
}

#[test]
fn a_device_of_the_largest_size_is_looked_at_here_and_there() {
    for size in [(64 << 20) + 5, 1 << 40, i64::MAX as u64] {
        conform::check(&format!("{size} bytes"), ConformOptions::default(), move || async move {
            Ok(sparse(size, true))
        });
    }
}

#[test]
fn a_device_that_throws_writes_away() {
    let options = ConformOptions {
        keeps_writes: false,
        content: InitialContent::Zeroes,
        ..ConformOptions::default()
    };
    for size in [100_000, i64::MAX as u64] {
        conform::check("null", options.clone(), move || async move { Ok(sparse(size, false)) });
    }
    let checks = ["a_completed_write_is_seen_by_later_reads", "random_requests_match_the_model"];
    let options = ConformOptions { only: checks.to_vec(), ..ConformOptions::default() };
    let report = conform::run("null", options, || async { Ok(sparse(100_000, false)) });
    assert!(checks.iter().all(|check| report.failed(check)), "{report:?}");
}
