//! Translates the options of nbdcopy to those of `blockhaul copy`.

use std::collections::BTreeMap;
use std::ffi::OsString;

use super::end::{CopyEndpoint, is_block_device};

pub(super) const OPTIONS: &str = "\
    help allocated blkhash=? blkhash-file= C|connections= destination-is-zero flush \
    long-options no-extents \
    p|progress=? queue-size= request-size= R|requests= short-options S|sparse= synchronous \
    target-is-zero:destination-is-zero T|threads= v|verbose V|version";

/// Default number of connections to each side.
const CONNECTIONS: u32 = 4;
/// Maximum number of requests in flight on each connection.
const REQUESTS: u32 = 64;
/// Options in the form of `blockhaul copy`; the last one of repeated options counts.
#[derive(Debug, Default)]
pub(super) struct Settings {
    options: BTreeMap<&'static str, Option<String>>,
    connections: Option<u32>,
    requests: Option<u32>,
    threads: Option<u32>,
}

impl Settings {
    pub(super) fn set(
        &mut self,
        name: &'static str,
        value: Option<OsString>,
    ) -> Result<(), String> {
        let Some(value) = value else {
            self.options.insert(name, None);
            return Ok(());
        };
        let text = value.to_string_lossy().into_owned();
        let count = || {
            text.trim().parse::<u32>().map_err(|_| format!("--{name}: {text:?} is not a number"))
        };
        let at_least_1 = |count: u32| match count {
            0 => Err(format!("--{name}: at least 1")),
            count => Ok(count),
        };
        let size = || {
            blockhaul_catalog::parse_size(&text)
                .map_err(|error| format!("--{name}: {}", error.text()))
        };
        let power_of_2 = |least: u64, most: u64| match size()? {
            size if size.is_power_of_two() && (least..=most).contains(&size) => Ok(size),
            _ => Err(format!("--{name}: {text:?} is not a power of 2 from {least} to {most}")),
        };
        let value = match name {
            "connections" => {
                self.connections = Some(at_least_1(count()?)?);
                return Ok(());
            }
            "requests" => {
                self.requests = Some(at_least_1(count()?)?);
                return Ok(());
            }
            "threads" => {
                self.threads = Some(count()?);
                return Ok(());
            }
            "progress" => {
                let fd = text.parse::<i32>().ok().filter(|fd| *fd >= 0);
                fd.ok_or_else(|| format!("--progress: {text:?} is not a descriptor"))?.to_string()
            }
            "request-size" => power_of_2(
                blockhaul_engine::MIN_REQUEST.into(),
                blockhaul_engine::MAX_REQUEST.into(),
            )?
            .to_string(),
            "sparse" => match size()? {
                0 => "0".to_string(),
                _ => power_of_2(512, u32::MAX.into())?.to_string(),
            },
            "blkhash" => {
                self.options.insert(name, None);
                return check_blkhash(&text);
            }
            "blkhash-file" => text,
            // The copy raises it to the request size. More than the maximum is no limit at all.
            "queue-size" => size()?.clamp(1, 64 << 30).to_string(),
            _ => return Err(format!("--{name} takes no value")),
        };
        self.options.insert(name, Some(value));
        Ok(())
    }

    /// The file of `--blkhash-file`.
    pub(super) fn digest_file(&self) -> Option<&str> {
        self.options.get("blkhash-file")?.as_deref()
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.options.contains_key(name)
    }

    /// Connections to each side: each has its own thread in nbdcopy, so that fewer threads mean
    /// fewer connections. Unlike there, the number of cores does not matter.
    fn connections(&self) -> u32 {
        let asked = self.connections.unwrap_or(CONNECTIONS);
        match self.threads {
            None | Some(0) => asked,
            Some(threads) => asked.min(threads),
        }
    }

    pub(super) fn words(&self, target: &CopyEndpoint) -> Vec<OsString> {
        let mut options = self.options.clone();
        options.remove("blkhash-file");
        if options.remove("blkhash").is_some() {
            options.insert("digest", Some("blksum".to_string()));
        }
        // A file is made anew, and nbdcopy then allocates all of it; here only zeroed ranges are
        // allocated.
        if self.has("allocated")
            && matches!(target, CopyEndpoint::Storage(path) if !is_block_device(path))
        {
            options.remove("destination-is-zero");
        }
        options.insert("connections", Some(self.connections().min(1024).to_string()));
        if options.contains_key("destination-is-zero") {
            // nbdcopy trusts the user.
            options.insert("trust", None);
        }
        if let Some(requests) = self.requests {
            options.insert("requests", Some(requests.min(65536).to_string()));
        }
        if let Some(threads) = self.threads {
            options.insert("threads", Some(threads.min(1024).to_string()));
        }
        // nbdcopy checks all bytes, shows nothing unless asked, has no timeouts, and ends with the
        // first error.
        options.entry("sparse").or_insert_with(|| Some("4096".to_string()));
        options.entry("request-size").or_insert_with(|| Some("262144".to_string()));
        options.insert("segment", Some("128m".to_string()));
        options.insert("timeout", Some("0".to_string()));
        options.insert("retries", Some("0".to_string()));
        options.insert("zero-all", None);
        if !self.has("progress") {
            options.insert("no-progress", None);
        }
        let word = |(name, value): (&str, Option<String>)| match value {
            Some(value) => format!("--{name}={value}").into(),
            None => format!("--{name}").into(),
        };
        options.into_iter().map(word).collect()
    }

    /// The options as printed by `--verbose`.
    pub(super) fn line(&self, piped: bool) -> String {
        let alone = piped || self.has("synchronous");
        let connections = if alone { 1 } else { self.connections() };
        let requests = self.requests.unwrap_or(REQUESTS);
        format!(
            "nbdcopy: connections={connections} requests={requests} threads={connections} \
             synchronous={alone}\n"
        )
    }
}

/// Refuses digests other than the default one, with blocks of 64 KiB.
fn check_blkhash(text: &str) -> Result<(), String> {
    let (algorithm, block) = text.split_once('/').unwrap_or((text, "64k"));
    let block = blockhaul_catalog::parse_size(block)
        .map_err(|error| format!("--blkhash: could not parse size: {}", error.text()))?;
    match algorithm {
        _ if !block.is_power_of_two() => Err(format!("--blkhash is not a power of two: {block}")),
        "sha256" if block == 64 << 10 => Ok(()),
        "md5" | "sha1" | "sha256" | "sha512" => {
            Err(format!("--blkhash={text} is not supported: only sha256/64k, the default, is"))
        }
        other => Err(format!("--blkhash: unknown digest algorithm '{other}'")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::getopt;

    fn settings(text: &str) -> Result<Settings, String> {
        let words: Vec<OsString> = text.split_whitespace().map(OsString::from).collect();
        let mut settings = Settings::default();
        for (name, value) in getopt::parse(OPTIONS, &words)?.options {
            settings.set(name, value)?;
        }
        Ok(settings)
    }

    fn words(text: &str) -> String {
        let words: Vec<String> = settings(text)
            .unwrap()
            .words(&CopyEndpoint::Null)
            .into_iter()
            .map(|w| w.into_string().unwrap())
            .collect();
        words.join(" ")
    }

    #[test]
    fn defaults_are_nbdcopys() {
        assert_eq!(
            words(""),
            "--connections=4 --no-progress --request-size=262144 --retries=0 --segment=128m \
             --sparse=4096 --timeout=0 --zero-all"
        );
        let line = settings("").unwrap().line(false);
        assert_eq!(line, "nbdcopy: connections=4 requests=64 threads=4 synchronous=false\n");
    }

    #[test]
    fn options_become_our_own() {
        let text = "-C 8 -R5 -T 2 --request-s=64k -S 0 --queue 1m --alloc --target --fl -p --synch";
        assert_eq!(
            words(text),
            "--allocated --connections=2 --destination-is-zero --flush --progress \
             --queue-size=1048576 --request-size=65536 --requests=5 --retries=0 --segment=128m --sparse=0 --synchronous \
             --threads=2 --timeout=0 --trust --zero-all"
        );
        assert!(words("--blkhash --blkhash-file=x").contains("--digest=blksum --no-progress"));
        assert!(words("--blkhash=sha256/65536").contains("--digest=blksum"));
        assert!(!words("--blkhash-file=x").contains("x"));
        assert!(words("--progress=3 --progress=4").contains("--progress=4"));
        // A file that is to be allocated is not assumed to be zero.
        let settings_of = settings("--allocated --destination-is-zero").unwrap();
        let file = settings_of.words(&CopyEndpoint::Storage("x".into()));
        assert!(file.iter().all(|word| word != "--destination-is-zero"), "{file:?}");
        let line = settings("--synchronous -T3").unwrap().line(false);
        assert_eq!(line, "nbdcopy: connections=1 requests=64 threads=1 synchronous=true\n");
    }

    #[test]
    fn wrong_values_are_refused() {
        let bad = [
            "-C 0",
            "-C x",
            "-C -1",
            "-R 0",
            "-T x",
            "-S 513",
            "-S 256",
            "-S 8G",
            "--request-size=2k",
            "--request-size=64m",
            "--request-size=1.5k",
            "--queue-size=",
            "--progress=json",
            "--progress=-1",
            "--blkhash=sha512",
            "--blkhash=sha256/128k",
            "--blkhash=sha256/1000",
            "--blkhash=foo",
        ];
        for text in bad {
            let error = settings(text).unwrap_err();
            assert!(error.starts_with("--"), "{text}: {error}");
        }
    }
}
