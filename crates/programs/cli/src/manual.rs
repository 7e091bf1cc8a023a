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
    let mut page = RoffPage { after_paragraph: true, ..RoffPage::default() };
    help.lines().for_each(|line| page.line(line));
    page.set_code(false);
    page.set_example(false);
    page.set_inner(false);
    page.roff
}

/// A page that is being written.
#[derive(Default)]
struct RoffPage {
    roff: String,
    /// In a section of examples or files.
    examples: bool,
    /// In code, which keeps its lines.
    code: bool,
    /// In entries that are indented further.
    inner: bool,
    /// In an example inside the entry of a device or layer.
    example: bool,
    /// The next line of prose begins a paragraph.
    after_paragraph: bool,
}

impl RoffPage {
    fn line(&mut self, line: &str) {
        let text = line.trim_start();
        let column = line.chars().count() - text.chars().count();
        let is_code = self.examples
            && (column > 2 || ["blockhaul ", "curl "].iter().any(|name| text.starts_with(name)));
        if !is_code {
            self.set_code(false);
        }
        let is_example = !self.examples && (EXAMPLE..=EXAMPLE + 2).contains(&column);
        self.set_example(is_example);
        if is_example {
            // A line of an example can begin with its own spaces.
            self.indented(column - EXAMPLE, text);
        } else if text.is_empty() {
            self.after_paragraph = true;
        } else if column == 0 {
            self.set_inner(false);
            self.heading(text);
        } else if is_code {
            self.close_inner(column);
            self.set_code(true);
            // Relative to the first line.
            self.indented(column.saturating_sub(6), text);
            self.after_paragraph = true;
        } else {
            self.close_inner(column);
            self.words(column, text);
        }
    }

    /// Entries, lines that continue them, and prose.
    fn words(&mut self, column: usize, text: &str) {
        if self.examples {
            self.prose(text);
        } else if column >= CONTINUED {
            self.indented(0, text);
        } else if let Some((term, what)) = entry(text, column) {
            if column > 2 {
                self.set_inner(true);
            }
            let _ = writeln!(self.roff, ".TP\n{}", escaped(term));
            if !what.is_empty() {
                self.indented(0, what);
            }
            self.after_paragraph = true;
        } else {
            self.prose(text);
        }
    }

    fn heading(&mut self, text: &str) {
        self.examples = text.contains("EXAMPLES") || text.contains("FILES");
        let _ = writeln!(self.roff, ".SH \"{}\"", escaped(text));
        self.after_paragraph = true;
    }

    fn prose(&mut self, text: &str) {
        if self.after_paragraph {
            self.roff += ".PP\n";
        }
        self.indented(0, text);
        self.after_paragraph = false;
    }

    fn indented(&mut self, spaces: usize, text: &str) {
        let _ = writeln!(self.roff, "{:spaces$}{}", "", escaped(text));
    }

    /// Ends entries that are indented further than `column`.
    fn close_inner(&mut self, column: usize) {
        if column <= 2 {
            self.set_inner(false);
        }
    }

    fn set_code(&mut self, code: bool) {
        switch(&mut self.code, code, &mut self.roff, [".RS 4\n.EX\n", ".EE\n.RE\n"]);
    }

    fn set_example(&mut self, example: bool) {
        switch(&mut self.example, example, &mut self.roff, [".EX\n", ".EE\n"]);
    }

    fn set_inner(&mut self, inner: bool) {
        switch(&mut self.inner, inner, &mut self.roff, [".RS 4\n", ".RE\n"]);
    }
}

/// Sets a state whose beginning and end have requests of roff.
fn switch(state: &mut bool, new: bool, roff: &mut String, [begin, end]: [&str; 2]) {
    if *state != new {
        *roff += if new { begin } else { end };
        *state = new;
    }
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
    if text.starts_with('.') { format!("\\&{text}") } else { text }
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
