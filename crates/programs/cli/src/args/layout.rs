//! The layout of `--help`: examples first, and short enough to be read.

/// Longer help has no empty lines between options, and names its topics instead of repeating them.
const LONG: usize = 200;

/// Help that is still longer has no exit statuses, either.
const FULL: usize = 260;

/// Sections that `blockhaul help TOPIC` prints, too: for long help, and for help that is still longer.
const TOPICS: [&str; 2] = ["JOB FILES", "EXIT STATUS"];

/// Lays out help that clap has rendered; help without examples (`-h`) stays as it is.
pub fn laid_out(help: &str) -> String {
    let mut sections = sections(help);
    let Some(at) = sections.iter().position(|section| section.name == "EXAMPLES") else {
        return help.to_string();
    };
    let examples = sections.remove(at);
    if help.lines().count() > LONG {
        sections.retain(|section| section.name != TOPICS[0]);
        sections
            .iter_mut()
            .filter(|section| section.holds_options())
            .for_each(HelpSection::tighten);
        let length = |section: &HelpSection<'_>| section.text().lines().count() + 1;
        if sections.iter().chain([&examples]).map(length).sum::<usize>() > FULL {
            sections.retain(|section| section.name != TOPICS[1]);
        }
    }
    // Before the arguments; after what the command is and how it is called.
    let place = sections.iter().position(HelpSection::holds_options).unwrap_or(sections.len());
    sections.insert(place, examples);
    let texts: Vec<String> = sections.iter().map(|section| section.text()).collect();
    texts.join("\n\n") + "\n"
}

/// A heading and the lines under it, without empty lines at the end.
struct HelpSection<'a> {
    /// Empty for the text before the first heading.
    name: String,
    lines: Vec<&'a str>,
}

impl HelpSection<'_> {
    /// Whether it is one of clap's, `Arguments:` and the groups of options.
    fn holds_options(&self) -> bool {
        self.name.ends_with(':')
    }

    fn tighten(&mut self) {
        self.lines.retain(|line| !line.trim().is_empty());
    }

    fn text(&self) -> String {
        self.lines.join("\n").trim_end().to_string()
    }
}

/// The sections of a text: a heading is a line that is not indented, behind an empty line, and in
/// capitals or with a colon at its end.
fn sections(help: &str) -> Vec<HelpSection<'_>> {
    let mut all = vec![HelpSection { name: String::new(), lines: Vec::new() }];
    let mut behind_empty = false;
    for line in help.lines() {
        let plain = plain(line);
        let is_heading = behind_empty
            && plain.starts_with(|first: char| first.is_ascii_uppercase())
            && (plain.ends_with(':') || plain.chars().all(|c| c.is_ascii_uppercase() || c == ' '));
        if is_heading {
            all.push(HelpSection { name: plain.clone(), lines: Vec::new() });
        }
        behind_empty = plain.is_empty();
        if let Some(last) = all.last_mut() {
            last.lines.push(line);
        }
    }
    all
}

/// A line without colours.
fn plain(line: &str) -> String {
    let mut parts = line.split('\u{1b}');
    let first = parts.next().unwrap_or_default();
    let rest = parts.map(|part| part.split_once('m').map_or("", |(_, text)| text));
    std::iter::once(first).chain(rest).collect::<String>().trim_end().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_come_first_and_long_help_is_tight() {
        let options: String =
            (0..100).map(|at| format!("      --o{at}\n          Text\n\n")).collect();
        let help = format!(
            "What it is\n\nMore of it.\n\nUsage: x [OPTIONS]\n\n\u{1b}[1mOptions:\u{1b}[0m\n{options}EXAMPLES\n  \
             One:\n      x\n\nJOB FILES\n  many\n\nEXIT STATUS\n  0  fine\n"
        );
        let text = laid_out(&help);
        let at = |word: &str| text.find(word).unwrap_or_else(|| panic!("{word}: {text}"));
        assert!(at("Usage:") < at("EXAMPLES") && at("EXAMPLES") < at("Options:"), "{text}");
        assert!(text.contains("EXIT STATUS") && !text.contains("JOB FILES"), "{text}");
        assert!(text.contains("--o1\n          Text\n      --o2\n"), "{text}");
        assert!(text.contains("What it is\n\nMore of it.\n\nUsage"), "{text}");
    }

    #[test]
    fn short_help_stays_as_it_is() {
        for help in ["Usage: x\n\nOptions:\n  -a  b\n", ""] {
            assert_eq!(laid_out(help), help);
        }
        let help = "X\n\nUsage: x\n\nOptions:\n  -a\n\n  -b\n\nEXAMPLES\n  x\n\nEXIT STATUS\n  0\n";
        let text = laid_out(help);
        assert!(text.contains("-a\n\n  -b") && text.contains("EXIT STATUS"), "{text}");
    }
}
