//! Random command lines of nbdkit: a plugin, filters, and parameters of both.

use blockhaul_testkit::rng::Rng;

/// What stands at byte 446 of every disk: an MBR with a primary partition of 200 sectors from sector 9
/// on, another of what 7 sectors make, and its signature.
pub const TABLE: [u8; 66] = {
    let mut table = [0; 66];
    table[4] = 0x83;
    table[8] = 9;
    table[12] = 200;
    table[20] = 0x83;
    table[24] = 250;
    table[28] = 7;
    table[64] = 0x55;
    table[65] = 0xaa;
    table
};

/// A command line.
pub struct Line {
    /// Bytes of the disk below.
    pub size: u64,
    filters: Vec<&'static str>,
    plugin: Vec<String>,
    parameters: Vec<String>,
}

impl Line {
    /// A random one.
    pub fn random(rng: &mut Rng) -> Line {
        let sizes =
            [1 << 20, (1 << 20) + 1, 700_001, (2 << 20) - 511, 4 << 20, 65536, 300_032, 8192, 511];
        let size = *rng.pick(&sizes);
        let mut line = Line { size, filters: vec![], plugin: vec![], parameters: vec![] };
        line.choose_plugin(rng);
        for _ in 0..*rng.pick(&[0, 1, 1, 1, 2, 2, 3]) {
            let filter = *rng.pick(FILTERS);
            if !line.filters.contains(&filter) {
                line.filters.push(filter);
                line.choose_parameters(filter, rng);
            }
        }
        line
    }

    /// Whether a filter is in it.
    pub fn has(&self, filter: &str) -> bool {
        self.filters.contains(&filter)
    }

    /// Whether this plugin or option of it, or parameter of a filter, is in it.
    pub fn says(&self, word: &str) -> bool {
        self.plugin.iter().chain(&self.parameters).any(|said| said == word)
    }

    /// Flags of the export that only one server advertises, and why.
    pub fn flags_that_differ(&self) -> u16 {
        // nbdkit's overlay cannot be zeroed, and ours can.
        let mut flags = if self.has("cow") { 1 << 6 } else { 0 };
        // A flush is offered where it has nothing to do, and with it FUA; trimming where there is something
        // to free.
        if self.says("full") {
            flags |= 1 << 2 | 1 << 3 | 1 << 5;
        }
        if self.says("pattern") {
            flags |= 1 << 2;
        }
        flags
    }

    /// Whether data and holes may be reported differently: these storages detect zeroes in blocks
    /// of other sizes than nbdkit's.
    pub fn extents_differ(&self) -> bool {
        self.says("memory") || self.says("data") || self.has("cow") || self.has("cache")
    }

    /// Whether zeroes and trims may be asked for, in flags that each stands for in an export's: nbdkit's
    /// `protect` ends with SIGSEGV when it refuses them, and `cow` here leaves parts of blocks untrimmed.
    /// nbdkit's `cache` keeps what was trimmed, and ends with a failed assertion for a trim that is durable.
    pub fn withheld(&self) -> u16 {
        let mut withheld = 0;
        if self.has("protect") {
            withheld |= 1 << 5 | 1 << 6;
        }
        if self.has("cow") || self.has("cache") {
            withheld |= 1 << 5;
        }
        // Layers may try what filters do not, and the other way round.
        if !self.filters.is_empty() {
            withheld |= 1 << 11;
        }
        withheld
    }

    /// Whether a single extent may be asked for: nbdkit's `truncate` ends with a failed assertion for one
    /// behind what is below.
    pub fn one_extent(&self) -> bool {
        !self.has("truncate")
    }

    /// Bytes at the beginning of a read that nbdkit makes up: its `sparse-random` has other ones in the rest of
    /// a block than in the whole, and its `cache` keeps what was written to `null`, which forgets it.
    pub fn made_up(&self, offset: u64) -> usize {
        if self.says("null") && self.has("cache") {
            return usize::MAX;
        }
        let into = offset % 4096;
        if self.says("sparse-random") && into > 0 { 4096 - into as usize } else { 0 }
    }

    /// Whether extents are nbdkit's own where its `cache` is wrong about them: it tells what is below, though
    /// there is more in the cache.
    pub fn stale_extents(&self) -> bool {
        self.has("cache")
    }

    /// The words behind options of the server; `disk` is the file where one is needed.
    pub fn words(&self, disk: &str) -> Vec<String> {
        let filters = self.filters.iter().map(|filter| format!("--filter={filter}"));
        let plugin = self.plugin.iter().map(|word| word.replace("DISK", disk));
        filters.chain(plugin).chain(self.parameters.iter().cloned()).collect()
    }

    fn choose_plugin(&mut self, rng: &mut Rng) {
        let size = self.size.to_string();
        let words: &[&str] = match rng.below(20) {
            0..8 => &["file", "DISK"],
            8 => &["-r", "file", "DISK"],
            9..13 => &["memory", &size],
            13 => &["-r", "pattern", &size],
            14 => &["null", &size],
            15 | 16 => &["data", "0x55 0xaa @1000 \"xyz\"*700 @20000 \"abc\"*9999", "size=SIZE"],
            17 => &["-r", "ones", &size],
            18 => &["full", &size],
            _ => &["sparse-random", &size, "seed=5", "runlength=3000"],
        };
        self.plugin = words.iter().map(|word| word.replace("SIZE", &size)).collect();
        if self.plugin[0] == "data" {
            self.size = self.size.max(60_000);
            self.plugin[2] = format!("size={}", self.size);
        }
    }

    fn choose_parameters(&mut self, filter: &str, rng: &mut Rng) {
        let size = self.size;
        let mut say = |name: &str, values: &[&str], rng: &mut Rng| {
            if rng.chance(70) {
                self.parameters.push(format!("{name}={}", rng.pick(values)));
            }
        };
        match filter {
            "blocksize" => {
                say("minblock", &["1", "512", "1024", "4096", "64k"], rng);
                say("maxdata", &["64k", "128k", "1M", "32M"], rng);
                say("maxlen", &["64k", "192k", "1M", "4294901760"], rng);
            }
            "blocksize-policy" => {
                say("blocksize-minimum", &["1", "512", "1024", "4096", "64k"], rng);
                say("blocksize-preferred", &["4096", "64k"], rng);
                say("blocksize-maximum", &["64k", "192k", "1M", "32M"], rng);
                say("blocksize-error-policy", &["allow", "error"], rng);
            }
            "cache" => {
                say("cache", &["writeback", "writethrough", "unsafe"], rng);
                say("cache-on-read", &["true", "false"], rng);
                say("cache-min-block-size", &["4k", "64k", "128k"], rng);
            }
            "cow" => say("cow-block-size", &["4k", "64k", "256k"], rng),
            "delay" => {
                say("delay-read", &["1ms"], rng);
                say("delay-zero", &["1ms"], rng);
                say("delay-write", &["1ms"], rng);
            }
            "fua" => say("fuamode", &["none", "emulate", "native", "force", "discard"], rng),
            "multi-conn" => {
                say("multi-conn-mode", &["auto", "emulate", "plugin", "disable", "unsafe"], rng)
            }
            "nocache" => say("cachemode", &["none", "emulate", "nop"], rng),
            "nozero" => {
                say("zeromode", &["none", "emulate", "notrim", "plugin"], rng);
                say("fastzeromode", &["default", "none", "slow", "ignore"], rng);
            }
            "offset" => {
                let offset = [0, 1, 511, 512, 4096, 65537][rng.below(6) as usize].min(size);
                let range = rng.below(size - offset + 1);
                say("offset", &[&offset.to_string()], rng);
                say("range", &[&range.to_string()], rng);
            }
            "partition" => self.parameters.push(format!("partition={}", rng.pick(&[1, 2]))),
            "protect" => {
                let start = rng.below(size + 1);
                let end = rng.between(start, size);
                let one = rng.below(size);
                let range = format!("{start}-{end}");
                let open = format!("{start}-");
                say("protect", &[&range, &open, "0-99"], rng);
                say("protect", &[&format!("{one}-{one}"), "~0-1000"], rng);
                // Of ranges that overlap, nbdkit protects what is behind the end of the second no more.
                let overlap = start <= one || one < 100;
                let last = self.parameters.last().cloned();
                let rest = last.as_deref() == Some("protect=~0-1000");
                if overlap || rest {
                    let is_last = |said: &String| Some(said) == last.as_ref();
                    self.parameters.retain(|said| !said.starts_with("protect=") || is_last(said));
                }
            }
            "rate" => say("rate", &["8G"], rng),
            "retry" => say("retry-delay", &["1"], rng),
            // With 8, nbdkit writes what happened to be in its memory.
            "swab" => say("swab-bits", &["16", "32", "64"], rng),
            "truncate" => {
                let to = rng.below(size * 2).to_string();
                say("truncate", &[&to, "0", "65536"], rng);
                let key = rng.pick(&["round-up", "round-down"]);
                let value = rng.pick(&["512", "4096", "65536"]);
                say(key, &[value], rng);
            }
            _ => {}
        }
    }
}

/// Filters that change nothing at random.
const FILTERS: &[&str] = &[
    "blocksize",
    "blocksize-policy",
    "cache",
    "cacheextents",
    "checkwrite",
    "cow",
    "delay",
    "fua",
    "multi-conn",
    "nocache",
    "noextents",
    "noparallel",
    "nozero",
    "offset",
    "partition",
    "protect",
    "rate",
    "readahead",
    "readonly",
    "retry",
    "retry-request",
    "scan",
    "swab",
    "truncate",
];
