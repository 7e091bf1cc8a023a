//! What happened: calls of functions, and misuse of the library.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

/// Maximum number of texts of misuse that are kept.
const TEXTS_MAX: usize = 32;

/// All counters of a process.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    functions: BTreeMap<&'static str, CallCounts>,
    pub(crate) open_handles: usize,
    pub(crate) most_handles: usize,
    pub(crate) connections: usize,
    /// Requests without an answer yet, now and at most.
    pub(crate) in_flight: usize,
    pub(crate) most_in_flight: usize,
    /// Results that the program must free, and has not freed yet.
    pub(crate) unfreed: usize,
    misuses: u64,
    texts: Vec<String>,
}

/// Calls of one function.
#[derive(Debug, Default)]
struct CallCounts {
    calls: u64,
    errors: u64,
    bytes: u64,
    time: Duration,
}

impl Counters {
    /// Counts the start of a call; returns its number, from 1.
    pub(crate) fn start(&mut self, function: &'static str) -> u64 {
        let calls = self.functions.entry(function).or_default();
        calls.calls += 1;
        calls.calls
    }

    /// Counts the end of a call, or of an asynchronous request.
    pub(crate) fn end(&mut self, function: &'static str, failed: bool, bytes: u64, time: Duration) {
        let calls = self.functions.entry(function).or_default();
        calls.errors += u64::from(failed);
        calls.bytes += bytes;
        calls.time += time;
    }

    /// Records misuse.
    pub(crate) fn misuse(&mut self, text: &str) {
        self.misuses += 1;
        if self.texts.len() < TEXTS_MAX {
            self.texts.push(text.to_string());
        }
    }

    /// Everything as JSON.
    pub(crate) fn json(&self) -> String {
        let mut json = String::from("{\n  \"functions\": {");
        for (index, (name, calls)) in self.functions.iter().enumerate() {
            let separator = if index == 0 { "" } else { "," };
            let _ = write!(
                json,
                "{separator}\n    \"{name}\": {{\"calls\": {}, \"errors\": {}, \"bytes\": {}, \
                 \"microseconds\": {}}}",
                calls.calls,
                calls.errors,
                calls.bytes,
                calls.time.as_micros()
            );
        }
        let texts: Vec<_> = self.texts.iter().map(|text| format!("{text:?}")).collect();
        let _ = write!(
            json,
            "\n  }},\n  \"handles\": {}, \"handles-most\": {}, \"connections\": {},\n  \"in-flight\": {}, \
             \"in-flight-most\": {}, \"unfreed\": {},\n  \"misuse\": {}, \"misuse-texts\": [{}]\n}}\n",
            self.open_handles,
            self.most_handles,
            self.connections,
            self.in_flight,
            self.most_in_flight,
            self.unfreed,
            self.misuses,
            texts.join(", ")
        );
        json
    }
}
