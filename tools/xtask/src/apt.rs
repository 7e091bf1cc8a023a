//! A private apt: a directory with its own sources, lists and empty package status, using the
//! mirror and the keyring of the machine's own apt sources. Signatures are always checked.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run;

/// One `deb` entry of the machine's apt sources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AptSource {
    /// Address of the archive, without the `dists` part.
    pub uri: String,
    /// Names of suites: `bookworm`, `bookworm-updates`, …
    pub suites: Vec<String>,
    /// Parts of the archive: `main`, `contrib`, …
    pub components: Vec<String>,
    /// Value of Signed-By unchanged: a path, or a key with its continuation lines.
    pub signed_by: Option<String>,
}

/// Entries of the machine's apt sources that look like the main Debian archive, best first.
/// Security updates and third-party archives are omitted.
pub fn debian_archives(etc_apt: &Path) -> Result<Vec<AptSource>, String> {
    let mut files = vec![etc_apt.join("sources.list")];
    if let Ok(dir) = fs::read_dir(etc_apt.join("sources.list.d")) {
        let mut more: Vec<PathBuf> = dir.flatten().map(|entry| entry.path()).collect();
        more.sort();
        files.append(&mut more);
    }
    let mut found = Vec::new();
    for file in files {
        let Ok(text) = fs::read_to_string(&file) else { continue };
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => found.append(&mut parse_list(&text)),
            Some("sources") => found.append(&mut parse_deb822(&text)),
            _ => {}
        }
    }
    found.retain(|source| rank(source).is_some());
    found.sort_by_key(|source| std::cmp::Reverse(rank(source)));
    found.dedup_by(|a, b| a.uri == b.uri && a.signed_by == b.signed_by);
    if found.is_empty() {
        return Err("none of the machine's apt sources is a Debian archive with a 'main' part; \
             peers are unpacked on Debian machines only"
            .into());
    }
    Ok(found)
}

/// How surely an entry is the main Debian archive; None if it is not.
fn rank(source: &AptSource) -> Option<u8> {
    let uri = source.uri.trim_end_matches('/');
    let debian_suites =
        ["bullseye", "bookworm", "trixie", "forky", "sid", "oldstable", "stable", "testing"];
    let suite = source.suites.iter().any(|suite| debian_suites.contains(&suite.as_str()));
    let main = source.components.iter().any(|component| component == "main");
    if !suite || !main || uri.contains("security") || uri.starts_with("cdrom:") {
        return None;
    }
    let named = uri.ends_with("/debian");
    match source.signed_by.as_deref() {
        Some(key) if key.contains("debian-archive") => Some(2 + u8::from(named)),
        // A third-party key: only if the address still is a Debian mirror.
        Some(_) => named.then_some(0),
        None => Some(u8::from(named)),
    }
}

/// Parses the one-line format: `deb [option=value …] URI SUITE COMPONENT…`.
fn parse_list(text: &str) -> Vec<AptSource> {
    let mut found = Vec::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        let Some(rest) = line.strip_prefix("deb").filter(|rest| rest.starts_with([' ', '\t']))
        else {
            continue;
        };
        let rest = rest.trim_start();
        let (options, rest) = match rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((options, rest)) => (options, rest),
            None => ("", rest),
        };
        let mut words = rest.split_whitespace().map(str::to_owned);
        let (Some(uri), Some(suite)) = (words.next(), words.next()) else { continue };
        let signed_by = options
            .split_whitespace()
            .find_map(|option| option.strip_prefix("signed-by="))
            .map(|value| value.replace(',', " "));
        found.push(AptSource { uri, suites: vec![suite], components: words.collect(), signed_by });
    }
    found
}

/// Parses the deb822 format: paragraphs of `Field: value` with continuation lines.
fn parse_deb822(text: &str) -> Vec<AptSource> {
    let mut found = Vec::new();
    let without_comments: Vec<&str> =
        text.lines().filter(|line| !line.starts_with('#')).map(str::trim_end).collect();
    for paragraph in without_comments.split(|line| line.is_empty()) {
        let mut fields: Vec<(String, String)> = Vec::new();
        for line in paragraph {
            if line.starts_with([' ', '\t']) {
                if let Some((_, value)) = fields.last_mut() {
                    value.push('\n');
                    value.push_str(line);
                }
            } else if let Some((name, value)) = line.split_once(':') {
                fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
            }
        }
        let field = |name: &str| {
            fields.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
        };
        let words = |name: &str| -> Vec<String> {
            field(name).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
        };
        let disabled = field("enabled").is_some_and(|value| value.eq_ignore_ascii_case("no"));
        if disabled || !words("types").iter().any(|kind| kind == "deb") {
            continue;
        }
        for uri in words("uris") {
            found.push(AptSource {
                uri,
                suites: words("suites"),
                components: words("components"),
                signed_by: field("signed-by").filter(|value| !value.is_empty()),
            });
        }
    }
    found
}

/// A private apt root over one suite of one archive.
pub struct AptRoot {
    dir: PathBuf,
    source: AptSource,
    suite: String,
}

impl AptRoot {
    /// Makes the directory's layout and configuration. Files of an earlier, interrupted run
    /// (package lists, complete and partial downloads) are reused.
    pub fn new(dir: &Path, source: &AptSource, suite: &str) -> Result<AptRoot, String> {
        let apt = AptRoot { dir: dir.to_owned(), source: source.clone(), suite: suite.to_owned() };
        for sub in ["state/lists/partial", "cache/archives/partial"] {
            let path = dir.join(sub);
            fs::create_dir_all(&path).map_err(|error| at("make", &path, &error))?;
        }
        // An empty status: every package counts as missing, so that the whole closure is fetched.
        write(&dir.join("status"), "")?;
        let mut text =
            format!("Types: deb\nURIs: {}\nSuites: {suite}\nComponents: main\n", source.uri);
        if let Some(key) = &source.signed_by {
            text += &format!("Signed-By: {key}\n");
        }
        write(&dir.join("archive.sources"), &text)?;
        write(&dir.join("apt.conf"), &apt.configuration()?)?;
        Ok(apt)
    }

    /// Fetches and verifies the suite's package lists.
    pub fn update(&self) -> Result<(), String> {
        // apt-get reports some failures as warnings only and exits with 0; this makes them errors.
        self.quiet(&["update", "-qq", "--error-on=any"])?;
        let policy = self.quiet_program("apt-cache", &["policy"])?;
        if policy.contains("o=Debian,") {
            Ok(())
        } else {
            Err(format!("the archive's {} is not Debian's", self.suite))
        }
    }

    /// Downloads the packages and all their dependencies; returns the .deb files.
    pub fn download(&self, packages: &[&str]) -> Result<Vec<PathBuf>, String> {
        // Older versions that an interrupted run left would be unpacked over the newer ones.
        self.quiet(&["autoclean", "-qq"])?;
        let mut args = vec!["install", "-qq", "-y", "--download-only", "--no-install-recommends"];
        args.extend_from_slice(packages);
        self.quiet(&args)?;
        let archives = self.dir.join("cache/archives");
        let entries = fs::read_dir(&archives).map_err(|error| at("read", &archives, &error))?;
        let mut debs: Vec<PathBuf> = entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
            .collect();
        debs.sort();
        Ok(debs)
    }

    /// A keyring with newer keys than this source's, from the machine's own suites and verified by
    /// the keys the machine already trusts. Returns a source that is verified by the newer keyring.
    pub fn newer_keyring(&self) -> Result<AptSource, String> {
        let Some(suite) = self.source.suites.iter().find(|suite| !suite.contains('-')) else {
            return Err("the machine's source names no release".into());
        };
        let dir = self.dir.join("keyring");
        let apt = AptRoot::new(&dir, &self.source, suite)?;
        apt.update()?;
        let debs = apt.download(&["debian-archive-keyring"])?;
        let unpacked = dir.join("unpacked");
        for deb in debs.iter().filter(|deb| package(deb).0 == "debian-archive-keyring") {
            run::quiet(Command::new("dpkg-deb").arg("-x").arg(deb).arg(&unpacked))?;
        }
        let keyring = unpacked.join("usr/share/keyrings/debian-archive-keyring.gpg");
        if !keyring.is_file() {
            return Err("the package debian-archive-keyring holds no keyring".into());
        }
        let signed_by = Some(keyring.display().to_string());
        Ok(AptSource { signed_by, ..self.source.clone() })
    }

    /// Settings: our own directories, the machine's network settings, nothing else of the machine's
    /// (its hooks would act on the machine).
    fn configuration(&self) -> Result<String, String> {
        let dump = run::quiet(Command::new("apt-config").arg("dump"))?;
        let dropped = [
            "Acquire::IndexTargets",
            "Acquire::Languages",
            "Acquire::GzipIndexes",
            "Acquire::AllowInsecureRepositories",
            "Acquire::AllowWeakRepositories",
            "Acquire::AllowDowngradeToInsecureRepositories",
        ];
        let mut text = String::new();
        for line in dump.lines() {
            if line.starts_with("Acquire::") && !dropped.iter().any(|drop| line.starts_with(drop)) {
                text.push_str(line);
                text.push('\n');
            }
        }
        let dir = self.dir.display();
        let architecture = run::quiet(Command::new("dpkg").arg("--print-architecture"))?;
        text += &format!(
            "Dir::State \"{dir}/state\";\n\
             Dir::State::status \"{dir}/status\";\n\
             Dir::State::extended_states \"{dir}/state/extended_states\";\n\
             Dir::Cache \"{dir}/cache\";\n\
             Dir::Etc::sourcelist \"{dir}/archive.sources\";\n\
             Dir::Etc::sourceparts \"/dev/null\";\n\
             Dir::Etc::main \"/dev/null\";\n\
             Dir::Etc::parts \"/dev/null\";\n\
             Dir::Etc::preferences \"/dev/null\";\n\
             Dir::Etc::preferencesparts \"/dev/null\";\n\
             Acquire::Languages \"none\";\n\
             Acquire::AllowInsecureRepositories \"false\";\n\
             Acquire::AllowWeakRepositories \"false\";\n\
             Acquire::AllowDowngradeToInsecureRepositories \"false\";\n\
             Acquire::Retries \"3\";\n\
             APT::Get::AllowUnauthenticated \"false\";\n\
             #clear APT::Architectures;\n\
             APT::Architectures {{ \"{}\"; }};\n\
             APT::Sandbox::User \"root\";\n",
            architecture.trim()
        );
        Ok(text)
    }

    fn quiet(&self, args: &[&str]) -> Result<String, String> {
        self.quiet_program("apt-get", args)
    }

    fn quiet_program(&self, program: &str, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(program);
        command.args(args).env("APT_CONFIG", self.dir.join("apt.conf")).env("LC_ALL", "C");
        command.env("DEBIAN_FRONTEND", "noninteractive");
        run::quiet(&mut command)
            .map_err(|why| if run::ci() { without_host(&why, &self.source.uri) } else { why })
    }
}

/// Name and version of a package, from the name of its file: `NAME_VERSION_ARCHITECTURE.deb`.
pub fn package(deb: &Path) -> (String, String) {
    let name = deb.file_stem().unwrap_or_default().to_string_lossy();
    let mut parts = name.split('_').map(|part| part.replace("%3a", ":"));
    (parts.next().unwrap_or_default(), parts.next().unwrap_or_default())
}

/// The text with the archive's host replaced.
pub fn without_host(text: &str, uri: &str) -> String {
    let Some((_, rest)) = uri.split_once("://") else { return text.to_owned() };
    let authority = rest.split('/').next().unwrap_or(rest);
    let host = authority.rsplit('@').next().unwrap_or(authority);
    let text = text.replace(authority, "MIRROR");
    if host.is_empty() { text } else { text.replace(host, "MIRROR") }
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| at("write", path, &error))
}

fn at(what: &str, path: &Path, error: &std::io::Error) -> String {
    format!("cannot {what} {}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_lines_are_read_with_and_without_options() {
        let text = "# deb http://a.example/debian bookworm main\n\
            deb http://a.example/debian bookworm main contrib # all\n\
            deb-src http://a.example/debian bookworm main\n\
            deb [arch=amd64 signed-by=/k/debian-archive.gpg] http://b.example/debian/ stable main\n\
            deb\n";
        let found = parse_list(text);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].components, ["main", "contrib"]);
        assert_eq!(found[0].signed_by, None);
        assert_eq!(found[1].uri, "http://b.example/debian/");
        assert_eq!(found[1].signed_by.as_deref(), Some("/k/debian-archive.gpg"));
    }

    #[test]
    fn deb822_paragraphs_are_read_with_comments_keys_and_disabled_entries() {
        let text = "Types: deb deb-src\n# remark\nURIs: http://a.example/debian http://b.example/x\n\
            Suites: bookworm bookworm-updates\nComponents: main\nSigned-By:\n -----BEGIN\n .\n abc\n\n\
            Types: deb\nURIs: http://c.example/debian\nSuites: bookworm\nComponents: main\n\
            Enabled: no\n\n\nTypes: deb-src\nURIs: http://d.example/debian\nSuites: sid\n";
        let found = parse_deb822(text);
        let uris: Vec<&str> = found.iter().map(|source| source.uri.as_str()).collect();
        assert_eq!(uris, ["http://a.example/debian", "http://b.example/x"]);
        assert_eq!(found[0].suites, ["bookworm", "bookworm-updates"]);
        assert_eq!(found[0].signed_by.as_deref(), Some("\n -----BEGIN\n .\n abc"));
    }

    #[test]
    fn only_main_debian_archives_are_ranked_and_the_surest_first() {
        let source = |uri: &str, suite: &str, component: &str, key: Option<&str>| AptSource {
            uri: uri.into(),
            suites: vec![suite.into()],
            components: vec![component.into()],
            signed_by: key.map(str::to_owned),
        };
        let archive = Some("/usr/share/keyrings/debian-archive-keyring.gpg");
        let of = |uri, suite, component, key| rank(&source(uri, suite, component, key));
        assert_eq!(of("http://a.example/debian", "bookworm", "main", archive), Some(3));
        assert_eq!(of("http://a.example/mirror", "bookworm", "main", archive), Some(2));
        assert_eq!(of("http://a.example/debian/", "bookworm", "main", None), Some(1));
        assert_eq!(of("http://a.example", "bookworm", "main", None), Some(0));
        assert_eq!(of("http://a.example/debian-security", "bookworm", "main", archive), None);
        assert_eq!(of("http://a.example/debian", "bookworm-security", "main", archive), None);
        assert_eq!(of("http://a.example", "bookworm", "main", Some("/k/vendor.gpg")), None);
        assert_eq!(of("http://a.example/debian", "bookworm", "stable", Some("/k/v.gpg")), None);
        assert_eq!(of("http://a.example/ubuntu", "noble", "main", None), None);
    }

    #[test]
    fn package_names_and_versions_come_from_file_names() {
        let (name, version) = package(Path::new("/a/qemu-utils_1%3a10.0.2+ds-2_amd64.deb"));
        assert_eq!((name.as_str(), version.as_str()), ("qemu-utils", "1:10.0.2+ds-2"));
    }

    #[test]
    fn hosts_and_credentials_are_taken_out_of_messages() {
        let text = "E: Failed to fetch http://u:p@a.example/debian/x Could not resolve 'a.example'";
        let clean = without_host(text, "http://u:p@a.example/debian");
        assert!(!clean.contains("a.example") && !clean.contains("u:p"), "{clean}");
    }
}
