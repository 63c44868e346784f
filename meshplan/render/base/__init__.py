"""Lines, trees and colours of text answers."""
