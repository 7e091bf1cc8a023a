//! Tokens of Rust, as far as imports need them: names, punctuation, and literals as one kind.

/// A token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Token {
    /// A name or keyword; `r#` is left out.
    Name(String),
    /// `::`.
    Path,
    /// Any other character of punctuation.
    Mark(char),
    /// A text, a character, a number or a lifetime.
    Literal,
}

impl Token {
    /// Whether it is this name.
    pub fn is(&self, word: &str) -> bool {
        matches!(self, Token::Name(name) if name == word)
    }

    /// Whether it is this character.
    pub fn mark(&self, mark: char) -> bool {
        *self == Token::Mark(mark)
    }
}

/// The tokens of a file, without comments.
pub fn tokens(text: &str) -> Vec<Token> {
    let chars: Vec<char> = text.chars().collect();
    let mut lexer = Lexer { chars: &chars, at: 0 };
    let mut tokens = Vec::new();
    while let Some(token) = lexer.next() {
        tokens.extend(token);
    }
    tokens
}

struct Lexer<'a> {
    chars: &'a [char],
    at: usize,
}

impl Lexer<'_> {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    /// The next token; an inner `None` is a comment or white space, an outer one the end.
    fn next(&mut self) -> Option<Option<Token>> {
        let first = self.peek(0)?;
        let second = self.peek(1);
        Some(match (first, second) {
            ('/', Some('/')) => {
                self.skip_while(|c| c != '\n');
                None
            }
            ('/', Some('*')) => {
                self.block_comment();
                None
            }
            ('"', _) => {
                self.text();
                Some(Token::Literal)
            }
            ('\'', _) => {
                self.character();
                Some(Token::Literal)
            }
            (':', Some(':')) => {
                self.at += 2;
                Some(Token::Path)
            }
            (c, _) if c.is_whitespace() => {
                self.at += 1;
                None
            }
            (c, _) if c.is_ascii_digit() => {
                self.skip_while(|c| c.is_alphanumeric() || c == '_');
                Some(Token::Literal)
            }
            (c, _) if c.is_alphabetic() || c == '_' => Some(self.word()),
            (c, _) => {
                self.at += 1;
                Some(Token::Mark(c))
            }
        })
    }

    fn skip_while(&mut self, holds: impl Fn(char) -> bool) {
        while self.peek(0).is_some_and(&holds) {
            self.at += 1;
        }
    }

    fn block_comment(&mut self) {
        let mut depth = 0;
        loop {
            match (self.peek(0), self.peek(1)) {
                (Some('/'), Some('*')) => {
                    depth += 1;
                    self.at += 2;
                }
                (Some('*'), Some('/')) => {
                    depth -= 1;
                    self.at += 2;
                    if depth == 0 {
                        return;
                    }
                }
                (Some(_), _) => self.at += 1,
                (None, _) => return,
            }
        }
    }

    /// A text in quotation marks, at the first of them.
    fn text(&mut self) {
        self.at += 1;
        while let Some(c) = self.peek(0) {
            self.at += if c == '\\' { 2 } else { 1 };
            if c == '"' {
                return;
            }
        }
    }

    /// A raw text, behind its `r`.
    fn raw_text(&mut self) {
        let before = self.at;
        self.skip_while(|c| c == '#');
        let hashes = self.at - before;
        self.at += 1;
        while self.at < self.chars.len() {
            let is_end = self.peek(0) == Some('"')
                && (1..=hashes).all(|ahead| self.peek(ahead) == Some('#'));
            if is_end {
                self.at += 1 + hashes;
                return;
            }
            self.at += 1;
        }
    }

    /// A character, or a lifetime, at its quotation mark.
    fn character(&mut self) {
        self.at += 1;
        match (self.peek(0), self.peek(1)) {
            (Some('\\'), _) => {
                self.at += 2;
                self.skip_while(|c| c != '\'');
                self.at += 1;
            }
            (Some(_), Some('\'')) => self.at += 2,
            _ => self.skip_while(|c| c.is_alphanumeric() || c == '_'),
        }
    }

    /// A name, or a text with a prefix.
    fn word(&mut self) -> Token {
        let start = self.at;
        self.skip_while(|c| c.is_alphanumeric() || c == '_');
        let word: String = self.chars[start..self.at].iter().collect();
        let is_raw = self.peek(0) == Some('"')
            || (self.peek(0) == Some('#') && matches!(self.peek(1), Some('"' | '#')));
        match word.as_str() {
            "r" | "br" | "cr" if is_raw => {
                self.raw_text();
                Token::Literal
            }
            "b" | "c" if self.peek(0) == Some('"') => {
                self.text();
                Token::Literal
            }
            "b" if self.peek(0) == Some('\'') => {
                self.character();
                Token::Literal
            }
            "r" if self.peek(0) == Some('#') => {
                self.at += 1;
                self.word()
            }
            _ => Token::Name(word),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        let names = tokens(text).into_iter().filter_map(|token| match token {
            Token::Name(name) => Some(name),
            _ => None,
        });
        names.collect()
    }

    #[test]
    fn texts_characters_and_lifetimes_are_no_names() {
        assert_eq!(names(r#"a "b \" c" d"#), ["a", "d"]);
        assert_eq!(
            names("a r##\"b \"# c\"## d r#e br\"f\" b\"g\\\\\" c\"h\" i"),
            ["a", "d", "e", "i"]
        );
        assert_eq!(names(r"a 'b' '\'' '\u{41}' &'c d b'e' '/' f"), ["a", "d", "f"]);
        assert_eq!(names("0x1f 1.5e3 1_000u64 ..a"), ["a"]);
    }

    #[test]
    fn comments_are_left_out() {
        assert_eq!(names("a // b\nc /* d /* e */ f */ g \"//\" h"), ["a", "c", "g", "h"]);
    }

    #[test]
    fn text_that_does_not_end_is_read_to_the_end_of_the_file() {
        for text in ["a \"b", "a r#\"b\"", "a /* b", "a '", "a '\\", "a \"\\"] {
            assert_eq!(names(text), ["a"], "{text}");
        }
    }
}
