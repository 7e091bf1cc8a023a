//! Generates sections of a manual page from the help text.
//!
//! Help is laid out for a terminal of 100 columns. A page is filled to any width: so paragraphs,
//! entries and examples are recognized by their indentation, and translated to their form in a
//! page.

use std::fmt::Write as _;

/// Minimum indentation of a line that continues the entry above it.
const CONTINUED: usize = 8;

/// Indentation of the examples of devices and layers, used by no other line of an entry.
pub const EXAMPLE: usize = 8;

/// The text of the help as sections of a page, in roff.
pub fn sections(help: &str) -> String {
    let mut roff = String::new();
    let mut examples = false;
    // Code is kept line by line, and inner entries are indented further.
    let (mut code, mut inner) = (false, false);
    // An example of a device or layer, inside its entry.
    let mut in_entry = false;
    let mut after_entry = true;
    for line in help.lines() {
        let text = line.trim_start();
        let column = line.chars().count() - text.chars().count();
        let is_code = examples
            && (column > 2 || ["blockhaul ", "curl "].iter().any(|name| text.starts_with(name)));
        // Indented as in the help: a line of an example can begin with its own spaces.
        let is_entry = !examples && (EXAMPLE..=EXAMPLE + 2).contains(&column);
        if code && !is_code {
            roff += ".EE\n.RE\n";
            code = false;
        }
        if in_entry != is_entry {
            roff += if is_entry { ".EX\n" } else { ".EE\n" };
            in_entry = is_entry;
        }
        if is_entry {
            let _ = writeln!(roff, "{:1$}{2}", "", column - EXAMPLE, escaped(text));
            continue;
        }
        if text.is_empty() {
            after_entry = true;
            continue;
        }
        if inner && column < CONTINUED && column <= 2 {
            roff += ".RE\n";
            inner = false;
        }
        if column == 0 {
            examples = text.contains("EXAMPLES") || text.contains("FILES");
            let _ = writeln!(roff, ".SH \"{}\"", escaped(text));
            after_entry = true;
        } else if is_code {
            if !code {
                roff += ".RS 4\n.EX\n";
                code = true;
            }
            // Indented as in the help, relative to the first line.
            let _ = writeln!(roff, "{:1$}{2}", "", column.saturating_sub(6), escaped(text));
            after_entry = true;
        } else if examples {
            if after_entry {
                roff += ".PP\n";
            }
            let _ = writeln!(roff, "{}", escaped(text));
            after_entry = false;
        } else if column >= CONTINUED {
            let _ = writeln!(roff, "{}", escaped(text));
        } else if let Some((term, what)) = entry(text, column) {
            if column > 2 && !inner {
                roff += ".RS 4\n";
                inner = true;
            }
            let _ = writeln!(roff, ".TP\n{}", escaped(term));
            if !what.is_empty() {
                let _ = writeln!(roff, "{}", escaped(what));
            }
            after_entry = true;
        } else {
            if after_entry {
                roff += ".PP\n";
            }
            let _ = writeln!(roff, "{}", escaped(text));
            after_entry = false;
        }
    }
    if code {
        roff += ".EE\n.RE\n";
    }
    if in_entry {
        roff += ".EE\n";
    }
    if inner {
        roff += ".RE\n";
    }
    roff
}

/// The subject of an entry, and the text on its first line; `None` for a line of prose.
fn entry(text: &str, column: usize) -> Option<(&str, &str)> {
    match text.find("  ") {
        Some(at) => Some((&text[..at], text[at..].trim_start())),
        // A long subject has a line of its own.
        None if !text.contains(". ") && !text.ends_with('.') && text.len() + column < 60 => {
            Some((text, ""))
        }
        None => None,
    }
}

/// A line in roff that appears literally, whatever it begins with.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
    match text.starts_with('.') {
        true => format!("\\&{text}"),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELP: &str = "\
EXAMPLES
  Some of it, and
  more of it:
      blockhaul copy a 'b'
      curl x
  Then:
      [[disk]]
        key = 1

DEVICES
  PATH          a path, which is
                literal
        blockhaul info a \\
          --json
    direct=on   no cache
  long:PATH,PATH
                said below
  Options of a device follow a question mark, and this line is long. Sizes
  follow a rule.

EXIT STATUS
  0       success
";

    #[test]
    fn paragraphs_are_filled_and_examples_kept() {
        let roff = sections(HELP);
        for part in [
            ".SH \"EXAMPLES\"\n.PP\nSome of it, and\nmore of it:\n.RS 4\n.EX\n\
             blockhaul copy a \\(aqb\\(aq\ncurl x\n.EE\n.RE\n",
            ".PP\nThen:\n.RS 4\n.EX\n[[disk]]\n  key = 1\n.EE\n.RE\n.SH \"DEVICES\"\n",
            ".TP\nPATH\na path, which is\nliteral\n.EX\nblockhaul info a \\e\n  \\-\\-json\n.EE\n.RS 4\n.TP\ndirect=on\nno cache\n.RE\n",
            ".TP\nlong:PATH,PATH\nsaid below\n.PP\nOptions of a device",
            "is long. Sizes\nfollow a rule.\n.SH \"EXIT STATUS\"\n.TP\n0\nsuccess\n",
        ] {
            assert!(roff.contains(part), "{part}\nis not in\n{roff}");
        }
    }

    #[test]
    fn no_line_becomes_a_request() {
        assert_eq!(escaped(".so /etc/passwd"), "\\&.so /etc/passwd");
        assert_eq!(escaped("'\\x-"), "\\(aq\\ex\\-");
    }

    #[test]
    fn what_begins_stands_before_what_ends() {
        let definition = crate::args::definition();
        for command in definition.get_subcommands().chain([&definition]) {
            let Some(help) = command.get_after_long_help() else { continue };
            let roff = sections(&help.to_string());
            for (begin, end) in [(".RS", ".RE"), (".EX", ".EE")] {
                let count = |what: &str| roff.lines().filter(|line| line.starts_with(what)).count();
                assert_eq!(count(begin), count(end), "{begin} in {}", command.get_name());
            }
            assert!(roff.contains("\n.SH \"EXIT STATUS\"\n"), "{}", command.get_name());
        }
    }
}
