//! A fuzz target: it takes any bytes and must not panic.

use crate::http;

/// Requests for metrics and for the page.
pub fn metrics_request(data: &[u8]) {
    let Ok(request) = http::parse(data) else { return };
    assert!(!request.path.is_empty());
}

#[cfg(test)]
mod tests {
    use blockhaul_testkit::mutate::mutated;
    use blockhaul_testkit::rng::{Rng, seed};

    use super::*;

    /// Changes valid inputs. `BLOCKHAUL_SEED` repeats a failure.
    #[test]
    fn requests_for_metrics_are_read_or_refused() {
        let seed = seed();
        println!("BLOCKHAUL_SEED={seed}");
        let mut rng = Rng::new(seed);
        let direct = "GET /metrics?name=a HTTP/1.1\r\nHost: [::1]:9100\r\nAccept: */*";
        let proxied = "HEAD http://localhost:9100/ HTTP/1.0\r\nVia: 1.1 proxy";
        for input in [direct, proxied] {
            assert!(http::parse(input.as_bytes()).is_ok(), "{input}");
            metrics_request(input.as_bytes());
            for _ in 0..200 {
                metrics_request(&mutated(&mut rng, input.as_bytes()));
            }
        }
    }
}
