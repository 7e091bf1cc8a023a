//! Profiles of the AWS command line: `~/.aws/credentials` and `~/.aws/config`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use blockhaul_block::{Error, Kind, Result};

use crate::files::read_text;

/// Largest file with profiles.
const PROFILES_MAX: u64 = 1 << 20;
/// Keys of profiles whose credentials come from elsewhere.
const ELSEWHERE: [&str; 4] =
    ["credential_process", "sso_session", "sso_start_url", "source_profile"];

/// The settings of a profile.
#[derive(Debug, Default)]
pub(crate) struct AwsProfile {
    settings: BTreeMap<String, String>,
}

impl AwsProfile {
    /// The profile of this name, from the files that the environment names. Blocks.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn read(name: &str) -> Result<AwsProfile> {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let home = variable("HOME").map(PathBuf::from).unwrap_or_default();
        let file = |variable_name, rest| {
            variable(variable_name).map_or_else(|| home.join(rest), PathBuf::from)
        };
        let mut profile = AwsProfile::default();
        profile.add(&file("AWS_CONFIG_FILE", ".aws/config"), name)?;
        profile.add(&file("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials"), name)?;
        Ok(profile)
    }

    fn add(&mut self, file: &Path, name: &str) -> Result<()> {
        match read_text(file, PROFILES_MAX) {
            Ok(text) => self.add_text(&text, name),
            Err(error) if error.kind() == Kind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn add_text(&mut self, text: &str, name: &str) {
        let mut is_inside = false;
        for line in text.lines() {
            // Indented lines are settings of one service.
            if line.starts_with([' ', '\t', '#', ';']) {
                continue;
            }
            if let Some(section) = line.trim_end().strip_prefix('[') {
                let section = section.trim_end_matches(']').trim();
                let section = section.strip_prefix("profile ").map_or(section, str::trim);
                is_inside = section == name;
            } else if let Some((key, value)) = line.split_once('=').filter(|_| is_inside) {
                self.settings.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
            }
        }
    }

    /// Whether no file has the profile.
    pub(crate) fn is_empty(&self) -> bool {
        self.settings.is_empty()
    }

    /// A setting that is not empty.
    pub(crate) fn setting(&self, name: &str) -> Option<&str> {
        self.settings.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Refuses a profile whose credentials come from elsewhere.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] for such a profile.
    pub(crate) fn check(&self, name: &str) -> Result<()> {
        let has_key = self.setting("aws_access_key_id").is_some();
        let Some(key) = ELSEWHERE.iter().find(|key| !has_key && self.setting(key).is_some()) else {
            return Ok(());
        };
        let text = format!("the profile {name} takes its credentials from {key}");
        let remedy = "run eval \"$(aws configure export-credentials --format env)\" first";
        Err(Error::new(Kind::Unsupported, text).with_remedy(remedy))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    #[test]
    fn settings_are_those_of_the_profile() {
        let mut profile = AwsProfile::default();
        let text =
            "[default]\nregion=a\n[profile work]\nregion = b\ns3 =\n  endpoint_url = no\n# x = y\n";
        profile.add_text(text, "work");
        profile.add_text(
            "[work]\naws_access_key_id=AK\naws_secret_access_key = S=\n[x]\nregion=c\n",
            "work",
        );
        assert_eq!(profile.setting("region"), Some("b"));
        assert_eq!(profile.setting("aws_secret_access_key"), Some("S="));
        assert_eq!((profile.setting("endpoint_url"), profile.setting("s3")), (None, None));
        profile.check("work").unwrap();
        let mut other = AwsProfile::default();
        other.add_text("[profile sso]\nsso_start_url = https://x\n", "sso");
        assert!(other.check("sso").unwrap_err().to_string().contains("sso_start_url"));
    }
}
