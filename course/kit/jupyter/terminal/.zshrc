# As bashrc, for zsh.
ZDOTDIR=$MINILLM_ZDOTDIR
[[ -r $ZDOTDIR/.zshrc ]] && source $ZDOTDIR/.zshrc
PATH=${lab_path%%:*}:$PATH
unset lab_path lab_folder MINILLM_ZDOTDIR
rehash
