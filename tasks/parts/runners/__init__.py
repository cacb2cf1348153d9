"""One small runner per runtime, all with one contract."""
