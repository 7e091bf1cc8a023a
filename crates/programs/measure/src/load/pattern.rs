//! Where requests go, and which of them write: the same for the same seed, whatever the server does.

use super::work::{AccessOrder, LoadWork};
use crate::random::RandomGenerator;

/// The requests of one connection, one after the other.
#[derive(Clone, Debug)]
pub(super) struct LoadPattern {
    random: RandomGenerator,
    order: AccessOrder,
    /// Requests of 100 that read.
    reads: u64,
    size: u64,
    /// The first place of this connection, and how many it has, in requests.
    first: u64,
    places: u64,
    /// The next one of requests in order.
    next: u64,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LoadRequest {
    pub(super) at: u64,
    pub(super) write: bool,
}

impl LoadPattern {
    /// Of connection `number` of so many. In order, each has a part of the span to itself, as far as
    /// there are enough requests in it.
    pub(super) fn new(work: &LoadWork, span: u64, number: u64) -> LoadPattern {
        let all = span / work.size;
        let parts = (work.connections as u64).min(all).max(1);
        let (first, places) = match work.order {
            AccessOrder::Random => (0, all),
            AccessOrder::Sequential => {
                let part = number % parts;
                let bound =
                    |part: u64| (u128::from(all) * u128::from(part) / u128::from(parts)) as u64;
                (bound(part), bound(part + 1) - bound(part))
            }
        };
        let mut seeds = RandomGenerator::new(work.seed);
        for _ in 0..number {
            seeds.number();
        }
        let random = RandomGenerator::new(seeds.number());
        let order = work.order;
        let reads = work.reads;
        let size = work.size;
        LoadPattern { random, order, reads, size, first, places: places.max(1), next: 0 }
    }

    pub(super) fn next(&mut self) -> LoadRequest {
        let place = match self.order {
            AccessOrder::Random => self.random.below(self.places),
            AccessOrder::Sequential => {
                let place = self.next;
                self.next = (place + 1) % self.places;
                place
            }
        };
        let write = match self.reads {
            100 => false,
            0 => true,
            reads => self.random.below(100) >= reads,
        };
        LoadRequest { at: (self.first + place) * self.size, write }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::LoadWork;

    fn work(order: AccessOrder, connections: usize, reads: u64) -> LoadWork {
        LoadWork {
            size: 4096,
            requests: 1,
            connections,
            order,
            reads,
            span: None,
            seed: 7,
            count: None,
            time: std::time::Duration::ZERO,
        }
    }

    #[test]
    fn all_of_a_span_is_gone_through_in_order_once() {
        let work = work(AccessOrder::Sequential, 3, 100);
        let mut seen = Vec::new();
        for number in 0..3 {
            let mut pattern = LoadPattern::new(&work, 10 * 4096 + 17, number);
            let own: Vec<u64> = (0..pattern.places).map(|_| pattern.next().at / 4096).collect();
            assert!(own.is_sorted(), "{own:?}");
            assert_eq!(pattern.next().at / 4096, own[0], "around again");
            seen.extend(own);
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..10).collect::<Vec<u64>>());
    }

    #[test]
    fn more_connections_than_requests_fit_share_them() {
        let work = work(AccessOrder::Sequential, 5, 100);
        for number in 0..5 {
            let at = LoadPattern::new(&work, 2 * 4096, number).next().at;
            assert!(at < 2 * 4096, "{at}");
        }
    }

    #[test]
    fn random_requests_repeat_with_the_seed_and_differ_between_connections() {
        let work = work(AccessOrder::Random, 2, 70);
        let take = |number| {
            let mut pattern = LoadPattern::new(&work, 1 << 20, number);
            (0..1000).map(|_| pattern.next()).collect::<Vec<LoadRequest>>()
        };
        assert_eq!(take(0), take(0));
        assert_ne!(take(0), take(1));
        let writes = take(0).iter().filter(|place| place.write).count();
        assert!((230..370).contains(&writes), "{writes}");
        assert!(take(1).iter().all(|place| place.at < 1 << 20 && place.at % 4096 == 0));
    }
}
